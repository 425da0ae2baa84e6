"""AdamW of an accelerator, one launch for all parameters, in Triton's interpreter: results, held steps, and how many
bytes a step moves.
"""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from every_case import by_turns
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardzoo import ops
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines import torch_engine
from shardzoo.trainer.optimizers.adamw import AdamW, clip_gradients

kernels = pytest.importorskip("shardzoo.ops.triton_kernels.optimizer")

SHAPES = [(1,), (7, 3), (2048,), (2049,), (3, 4096), (0,)]
SETTINGS = {"lr": 0.01, "betas": (0.8, 0.999), "eps": 1e-6}
SHORT = (torch.bfloat16, torch.float16)


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def make_groups(parameters):
    return [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "weight_decay": 0.0},
    ]


def make_gradients(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("rounded", by_turns([None, *SHORT], 3), ids=str)
@pytest.mark.parametrize("short", [torch.float32, *SHORT], ids=str)
def test_steps_are_pytorchs_in_fp64(short, rounded):
    mine = make_parameters()
    theirs = [nn.Parameter(p.detach().double()) for p in mine]
    optimizer = AdamW(make_groups(mine), **SETTINGS, fused=True)
    expected = torch.optim.AdamW(make_groups(theirs), **SETTINGS)
    copies = [torch.full_like(p, math.nan, dtype=rounded or torch.bfloat16) for p in mine]
    if rounded is not None:
        optimizer.rounded = dict(zip(mine, copies, strict=True))
    for step in range(4):
        gradients = make_gradients(step, short)
        gradients[step] = None
        for p, q, gradient in zip(mine, theirs, gradients, strict=True):
            p.grad_dtype = None
            p.grad = gradient
            q.grad = None if gradient is None else gradient.double()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 3.0)
        with ops.kernels("triton"):
            found = clip_gradients(mine, 3.0, optimizer).double()  # PyTorch's, in fp32
            torch.testing.assert_close(found, norm, rtol=4e-6, atol=0.0)
            optimizer.step()
        expected.step()
        assert optimizer.has_rounded == (rounded is not None)
        assert all(p.grad is gradient for p, gradient in zip(mine, gradients, strict=True))
    for p, q, copied in zip(mine, theirs, copies, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-6, atol=2e-6)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            value = expected.state[q][name]
            torch.testing.assert_close(
                optimizer.state[p][name].double(), value.double(), rtol=2e-6, atol=1e-7
            ) if p.numel() else None
        if rounded is not None and p.numel():
            # The interpreter truncates to bf16, where a GPU rounds.
            ulp = torch.finfo(rounded).eps if rounded == torch.bfloat16 else 0.0
            torch.testing.assert_close(
                copied.float(), p.detach().to(rounded).float(), rtol=ulp, atol=0.0
            )


def test_a_step_is_held():
    parameters = make_parameters()
    optimizer = AdamW(make_groups(parameters), **SETTINGS, fused=True)
    for p, gradient in zip(parameters, make_gradients(0, torch.float32), strict=True):
        p.grad = gradient
    with ops.kernels("triton"):
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict()["state"])
        values = [p.detach().clone() for p in parameters]
        vars(optimizer)["found_inf"] = torch.ones(())
        for p in parameters:
            p.grad.fill_(math.nan)
        optimizer.step()
        assert all(map(torch.equal, values, parameters))
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(value, before[number][name])


def test_the_rate_may_be_on_the_device():
    """Where a CUDA graph reads it anew."""
    results = []
    for rate in (0.02, torch.tensor(0.02)):
        parameters = make_parameters()
        optimizer = AdamW(make_groups(parameters), **SETTINGS, fused=True)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for p, gradient in zip(parameters, make_gradients(0, torch.float32), strict=True):
            p.grad = gradient
        with ops.kernels("triton"):
            optimizer.step()
        results.append(parameters)
    assert all(map(torch.equal, *results))


def test_what_the_kernel_does_not_take_is_pytorchs_step():
    parameters = make_parameters(torch.float64)
    optimizer = AdamW(parameters, lr=0.1, fused=True)
    expected = [p.detach().clone().requires_grad_() for p in parameters]
    theirs = torch.optim.AdamW(expected, lr=0.1, fused=True)
    for p, q, gradient in zip(parameters, expected, make_gradients(0, torch.float64), strict=True):
        p.grad = gradient
        q.grad = gradient.clone()
    with ops.kernels("triton"):
        assert optimizer._collect_updates() is None
        optimizer.step()
    theirs.step()
    assert all(map(torch.equal, parameters, expected))


class CountBytes(TorchDispatchMode):
    """Counts the bytes that PyTorch's operators read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in func.name():
            given = torch.utils._pytree.tree_leaves((args, kwargs))
            made = torch.utils._pytree.tree_leaves(results)
            named = [t for t in (*given, *made) if isinstance(t, torch.Tensor)]
            self.bytes[func.name()] += sum(t.numel() * t.element_size() for t in named)
        return results


def count_kernel_bytes(patch):
    """Returns what counts the bytes that the interpreter loads and stores."""
    from triton.runtime import interpreter

    counts = Counter()

    class Memory:
        @staticmethod
        def load(pointers, mask, other, kind):
            counts["read"] += int(mask.sum()) * kind.itemsize
            return real.load(pointers, mask, other, kind)

        @staticmethod
        def store(pointers, value, mask):
            counts["written"] += int(mask.sum()) * value.dtype.itemsize
            return real.store(pointers, value, mask)

        def __getattr__(self, name):
            return getattr(real, name)

    real = interpreter._interpreter
    patch.setattr(interpreter, "_interpreter", Memory())
    return counts


def make_engine(micro_batches, elements=1 << 15):
    """Returns an engine of one bf16 parameter after the backward passes of a step."""
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(elements).to(torch.bfloat16))
    optimizer = AdamW([model.weight], lr=0.1, fused=True)
    arguments = TrainingArguments(precision="bf16", clip_grad=1.0, save_optim=False)
    return torch_engine.TorchEngine(model, optimizer, arguments), torch.randn(
        micro_batches, elements
    )


def run_step(engine, factors):
    for factor in factors:
        engine.backward((engine.module.weight.float() * factor).sum())


def test_a_step_moves_at_most_36_bytes_a_parameter():
    """From the 16-bit gradient of the backward pass to the 16-bit parameter: norm, clipping, update and rounding."""
    elements = 1 << 15
    with ops.kernels("triton"), pytest.MonkeyPatch.context() as patch:
        engine, factors = make_engine(1, elements)
        run_step(engine, factors)
        engine.step()  # makes the states
        loss = (engine.module.weight.float() * factors[0]).sum()
        loss.backward()
        counts = count_kernel_bytes(patch)
        with CountBytes() as others:
            engine._masters.accumulate_grads()
            engine.step()
    moved = sum(counts.values()) + sum(others.bytes.values())
    assert counts["read"] >= 14 * elements  # the gradient, and three tensors in fp32
    assert counts["written"] >= 14 * elements
    assert 30 * elements <= moved <= 31 * elements, (counts, others.bytes)
    assert moved <= 36 * elements


def test_gradients_of_micro_batches_add_up_in_fp32():
    results = []
    for variant in ("triton", "reference"):
        with ops.kernels(variant):
            engine, factors = make_engine(3)
            assert engine._masters.keeps_short_gradients == (variant == "triton")
            run_step(engine, factors)
            master = engine._masters.pairs[0][1]
            assert master.grad.dtype == torch.float32
            results.append(master.grad)
    assert torch.equal(*results)


def test_addresses_are_sent_again_only_if_they_change():
    table = kernels.LaunchTable()
    rows = [[16, 32, 48, 64, 80, 0, kernels.BLOCK + 1], [160, 320, 480, 640, 800, 0, 5]]
    assert table.fill(rows, torch.device("cpu")) == 3
    first = table.addresses, table.owners
    assert table.owners.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert table.fill([list(row) for row in rows], torch.device("cpu")) == 3
    assert table.addresses is first[0]
    assert table.owners is first[1]
    moved = [[0, *row[1:]] for row in rows]
    table.owners.fill_(-1)
    table.fill(moved, torch.device("cpu"))
    assert table.addresses.tolist() == moved
    assert table.owners is first[1]
    # A pair for each 1,024 elements of a model: to send them in each step would take longer than the step.
    assert table.owners.tolist() == [[-1, -1]] * 3
    longer = [moved[0], [*moved[1][:6], 2 * kernels.BLOCK + 1]]
    assert table.fill(longer, torch.device("cpu")) == 5
    assert table.owners.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]


def test_a_recorded_launch_takes_no_memory_of_the_graph(monkeypatch):
    """The graph would write other tensors there before the launch reads its table."""
    eager = kernels.LaunchTable()
    eager.fill([[16, 32, 48, 64, 80, 0, 5]], torch.device("cpu"))
    table = eager.copy_for_recording()
    kept = table.addresses
    kept.zero_()
    monkeypatch.setattr(kernels, "is_recording", lambda _: True)
    assert table.fill([[16, 96, 48, 64, 80, 0, 5]], torch.device("cpu")) == 1
    assert table.addresses is kept
    assert not kept.any()
    table.send()
    assert kept.tolist() == [[16, 96, 48, 64, 80, 0, 5]]
    assert table.owners.tolist() == [[0, 0]]
    assert eager.addresses.tolist() == [[16, 32, 48, 64, 80, 0, 5]]
    with pytest.raises(RuntimeError, match="updates other parameters than the step before"):
        table.fill([[16, 96, 48, 64, 80, 0, 6]], torch.device("cpu"))


def test_no_step_prints_a_tensor(monkeypatch):
    """A call that fits no overload by its first argument prints its tensors, for which the host waits."""
    printed = []
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda *_, **__: printed.append(1) or "")
    parameters = make_parameters()
    optimizer = AdamW(make_groups(parameters), **SETTINGS, fused=True)
    for found_inf in (None, torch.tensor(0.0), torch.tensor(1.0)):
        if found_inf is not None:
            optimizer.found_inf = found_inf
        for parameter, gradient in zip(parameters, make_gradients(1, torch.float32), strict=True):
            parameter.grad = gradient
        with ops.kernels("triton"):
            clip_gradients(parameters, 0.5, optimizer)
            optimizer.step()
    assert not printed
