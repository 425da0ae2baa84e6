"""The trainer's AdamW against PyTorch's: updates, states, clipping, rounding, held steps, and what falls back."""

from __future__ import annotations

import copy
import importlib
import json
import math

import pytest
import torch
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import nn

from shardzoo import ops
from shardzoo.mpu import grad_norm
from shardzoo.ops import library, variants
from shardzoo.ops import optimizer as optimizer_ops
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines import torch_engine
from shardzoo.trainer.engines.deepspeed_config import deepspeed_config
from shardzoo.trainer.optimizers.adamw import AdamW, clip_gradients

has_kernels = variants.unavailable("cpp", "cpu") is None
needs_kernels = pytest.mark.skipif(not has_kernels, reason="no compiled kernels")
SHAPES = [(1,), (7,), (16,), (3, 5), (130, 129), (8193,), (3, 8192)]


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def ours(params, kind=AdamW):
    return kind(params, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_steps_are_pytorchs(dtype):
    mine, theirs = parameters(dtype), parameters(dtype)
    optimizer, expected = ours(mine), ours(theirs, torch.optim.AdamW)
    for step in range(5):
        for params, one in ((mine, optimizer), (theirs, expected)):
            give_gradients(params, step)
            params[step].grad = None
            clip_gradients(params, 3.0, one)
            one.step()
    tolerance = dict.fromkeys(
        ("rtol", "atol"), 5 * torch.finfo(dtype).eps
    )  # a rounding for each step
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
        for name, value in expected.state[b].items():
            torch.testing.assert_close(optimizer.state[a][name], value, **tolerance)


@needs_kernels
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=str)
def test_the_step_rounds(short):
    masters = parameters(torch.float32)
    optimizer = ours(masters)
    rounded = [torch.zeros_like(master, dtype=short) for master in masters]
    optimizer.rounded = dict(zip(masters[1:], rounded[1:], strict=True))
    give_gradients(masters, 0)
    optimizer.step()
    assert optimizer.has_rounded
    assert not rounded[0].any()
    for master, value in zip(masters[1:], rounded[1:], strict=True):
        assert torch.equal(master.to(short), value)


def test_scattered_parameters_are_rounded():
    """Those that lie in a larger tensor, of which the rest must not change."""
    whole = torch.ones(4, 8, dtype=torch.bfloat16)
    parameter = nn.Parameter(whole[:, :4])
    model = nn.Module()
    model.weight = parameter
    optimizer = AdamW([parameter], lr=1.0, weight_decay=0.0, fused=True)
    engine = torch_engine.TorchEngine(
        model, optimizer, TrainingArguments(precision="bf16", save_optim=False)
    )
    engine.backward((model.weight.float() * 2).sum())
    engine.step()
    assert whole[:, :4].abs().max() < 1e-6
    assert torch.equal(whole[:, 4:], torch.ones(4, 4))


def test_a_graph_of_the_old_weights_is_refused():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight = parameter
    optimizer = ours([parameter])
    engine = torch_engine.TorchEngine(
        model, optimizer, TrainingArguments(precision="bf16", save_optim=False)
    )
    loss = (model.weight * model.weight).sum()
    engine.backward(model.weight.sum())
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_kernels
def test_the_kernel_is_used_once_for_a_parameter_and_leaves_gradients(monkeypatch):
    params, calls, call = parameters(torch.float32), [], library.call_compiled
    monkeypatch.setattr(
        "shardzoo.ops.optimizer.call_compiled",
        lambda kernel, *arguments: (calls.append(kernel), call(kernel, *arguments))[1],
    )
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer = ours(params)
    norm = clip_gradients(params, 0.5, optimizer)
    optimizer.step()
    assert calls == ["square_sum"] * len(params) + ["adamw"] * len(params)
    assert all(map(torch.equal, before, (p.grad for p in params)))
    assert norm > 0.5
    assert optimizer.grad_factor is None  # the next step is not clipped by this norm


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_step_is_held(kernels):
    """Where `found_inf` is 1, nothing changes, as GradScaler asks."""
    params = parameters(torch.float32)
    optimizer = ours(params)
    with ops.kernels(kernels):
        give_gradients(params, 0)
        optimizer.step()
        before, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        for p in params:
            p.grad.fill_(math.nan)
        vars(optimizer)["found_inf"] = torch.ones(())
        optimizer.step()
        assert all(map(torch.equal, before, params))
        for index, values in state["state"].items():
            for name, value in values.items():
                assert torch.equal(optimizer.state_dict()["state"][index][name], value)
        vars(optimizer)["found_inf"] = torch.zeros(())
        give_gradients(params, 1)
        optimizer.step()
        assert not any(map(torch.equal, before, params))


@needs_kernels
def test_other_layouts_and_options_take_pytorchs_step():
    def step(change):
        params = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(5))]
        optimizer = ours(params)
        for p in params:
            p.grad = torch.ones_like(p)
        change(optimizer, params)
        optimizer.rounded = {params[1]: torch.zeros(5, dtype=torch.bfloat16)}
        clip_gradients(params, 0.1, optimizer)
        optimizer.step()
        return optimizer.has_rounded, params

    assert step(lambda optimizer, params: None)[0]
    _, expected = step(lambda optimizer, params: None)
    changes = [
        lambda optimizer, params: setattr(params[0], "grad", torch.ones(6, 4).t()),
        lambda optimizer, params: optimizer.param_groups[0].update(amsgrad=True),
    ]
    for change in changes:
        used, params = step(change)
        assert not used
        for a, b in zip(params, expected, strict=True):
            torch.testing.assert_close(a, b)
    used, params = step(lambda optimizer, params: optimizer.param_groups[0].update(maximize=True))
    assert not used
    assert (params[0] > expected[0]).all()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_hooks_of_a_step_are_called_once(kernels):
    """Though PyTorch's step, which is called where the kernel cannot be, is one that calls them."""
    params, seen = parameters(torch.float32), []
    ours(
        parameters(torch.float32), torch.optim.AdamW
    )  # PyTorch hooks a class when it is first used
    optimizer = ours(params)
    optimizer.rounded = {params[0]: torch.zeros(1, dtype=torch.bfloat16)}
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    give_gradients(params, 0)
    with ops.kernels(kernels):
        optimizer.step()
    assert seen == ["before", "after"]
    assert optimizer.has_rounded == (kernels == "auto" and has_kernels)


@needs_kernels
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("elements", [1, 37, 8192, 8193, 40000])
def test_square_sum(elements, dtype):
    x = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    assert library.call_compiled("square_sum", x) == pytest.approx(
        float(x.double().square().sum()), rel=1e-6
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = library.call_compiled("square_sum", x)
    torch.set_num_threads(threads)
    assert one == library.call_compiled("square_sum", x)


def test_parameters_elsewhere_take_pytorchs_step():
    """As on a GPU, which the meta device stands for; PyTorch has no fused step there, but is asked for it."""
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    parameter.grad = torch.ones(3, device="meta")
    optimizer = ours([parameter])
    with pytest.raises(RuntimeError, match="fused=True"):
        optimizer.step()
    assert not optimizer.has_rounded


def test_norms_of_what_the_kernel_does_not_take():
    x = nn.Parameter(torch.ones(4, 6))
    x.grad = torch.arange(24.0).view(6, 4).t()
    assert not optimizer_ops.suits_optimizer_kernels(x.grad)
    assert grad_norm([x]) == torch.arange(24.0).norm()
    for special in (math.inf, math.nan):
        x.grad = torch.full((4, 6), special)
        assert not grad_norm([x]).isfinite()


@pytest.mark.parametrize(
    ("file", "expected"), [({}, 0.0), ({"torch_autocast": {"enabled": True}}, 0.5)], ids=str
)
def test_deepspeed_clips_only_gradients_that_it_scales(tmp_path, file, expected):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    arguments = TrainingArguments(
        env_type="deepspeed", zero_stage=0, clip_grad=0.5, deepspeed_config=str(path)
    )
    assert deepspeed_config(arguments, 1, 10)["gradient_clipping"] == expected


def test_zero_does_not_warn_of_it():
    importlib.import_module("shardzoo.trainer.engines.deepspeed_engine")
    assert AdamW in ZERO_SUPPORTED_OPTIMIZERS


def test_a_step_without_gradients_changes_nothing():
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = AdamW([parameter], lr=0.1, fused=True)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(5))
    assert not optimizer.state
