"""AdamW with states in 8 bits takes torchao's steps, and goes on bit for bit."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from every_case import every_day
from torch import nn
from training import Pairs, losses, native_t5, on_ranks, run_training

from shardzoo.checkpoint.safetensors_header import read_header
from shardzoo.models.sizes import ParameterSize
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.estimate import Job
from shardzoo.trainer.estimate.estimate import state_bytes
from shardzoo.trainer.optimizers.registry import find_optimizer

SETTINGS = {"optimizer": "adamw8bit", "lr": 1e-2, "weight_decay": 0.1}
# Feed-forward weights have blocks of their own; the others are too small.
RUN = {
    **SETTINGS, "train_steps": 6, "model": partial(native_t5, d_model=32, d_ff=128), "data": Pairs(40),
}  # fmt: skip


def make_model() -> nn.Module:
    torch.manual_seed(0)
    # Two quantized weights, one that blocks do not divide, one that is small.
    return nn.Sequential(
        nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 65, bias=False), nn.Linear(65, 3)
    )


def test_ten_steps_are_those_of_torchao():
    torchao = pytest.importorskip("torchao.optim")
    own = make_model()
    other = make_model()
    optimizer = make_optimizer(own, TrainingArguments(**SETTINGS))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    by_shape = dict(zip(own.parameters(), other.parameters(), strict=True))
    for group, ours in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = [by_shape[parameter] for parameter in ours["params"]]
    oracle = torchao.AdamW8bit(groups, lr=1e-2)
    for step in range(10):
        for model, takes in ((own, optimizer), (other, oracle)):
            takes.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            with torch.compiler.set_stance("force_eager"):
                takes.step()
    for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
        assert mine.equal(theirs)

    # The memory is what the estimate counts.
    held = 0
    for state in optimizer.state.values():
        for value in (state["exp_avg"], state["exp_avg_sq"]):
            parts = [value]
            if hasattr(value, "__tensor_flatten__"):
                parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            held += sum(part.nbytes for part in parts)
    sizes = [ParameterSize("", tuple(p.shape), tuple(p.shape), False) for p in own.parameters()]
    assert held == state_bytes(find_optimizer("adamw8bit"), sizes)
    assert held < 0.5 * 8 * sum(parameter.numel() for parameter in own.parameters())


@pytest.mark.parametrize(
    ("env_type", "precision"),
    every_day([("pytorch", "bf16")], more=[("pytorch", "fp32"), ("pytorchDDP", "fp32")]),
)
def test_a_run_goes_on_bit_for_bit(run_mesh, tmp_path, env_type, precision):
    pytest.importorskip("torchao")

    def run(name: str, **more):
        arguments = {**RUN, "env_type": env_type, "precision": precision, **more}
        if env_type == "pytorchDDP":
            return on_ranks(run_mesh, tmp_path / name, data_ranks=2, **arguments)
        return [run_training(None, tmp_path / name, **arguments)]

    whole = run("whole", save_interval=3)
    rest = run("rest", load_dir=str(tmp_path / "whole" / "checkpoints" / "step-000003"))
    for (steps, weights), (later, same) in zip(whole, rest, strict=True):
        assert losses(later) == losses(steps)[3:]
        for key, value in weights.items():
            assert value.equal(same[key]), key
    header = read_header(tmp_path / "whole/checkpoints/step-000003/optimizer_00.safetensors")[0]
    codes = [tensor for tensor in header if tensor.name.startswith("exp_avg.codes/")]
    assert len(codes) > 4
    assert {tensor.dtype for tensor in codes} == {"U8"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"env_type": "fsdp"},
        {"env_type": "deepspeed"},
        {"env_type": "deepspeed+mpu", "model_parallel_size": 2},
        {"env_type": "pytorchDDP", "context_parallel_size": 2},
    ],
)
def test_it_is_refused_where_parameters_or_states_are_split(arguments):
    with pytest.raises(ValueError, match="works with env_type 'pytorch' and 'pytorchDDP' alone"):
        TrainingArguments(optimizer="adamw8bit", **arguments)


@pytest.mark.parametrize("layout", [{"fsdp": True}, {"zero_stage": 1}, {"tensor_parallel_size": 2}])
def test_the_estimate_refuses_it_there_too(layout):
    with pytest.raises(ValueError, match="blocks of whole parameters"):
        Job(optimizer="adamw8bit", **layout)


def test_without_torchao_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.delitem(sys.modules, "shardzoo.trainer.optimizers.adamw8bit", raising=False)
    with pytest.raises(ValueError, match=r'pip install "shardzoo\[torchao\]"'):
        make_optimizer(make_model(), TrainingArguments(**SETTINGS))
