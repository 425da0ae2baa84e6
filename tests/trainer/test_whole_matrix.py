"""Adafactor and LAMB update split parameters as the libraries' optimizers update them unsplit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardzoo.mpu import Shard
from shardzoo.mpu.parameter import split_parameter

STEPS = 10
LARGE = 12.0  # above LAMB's limit of 10
SHARDS = {
    "square": Shard((24, 24), 0),
    "wide": Shard((5, 50), 1),
    "tall, in odd parts": Shard((53, 7), 0),
    "fused": Shard((32, 9), 0, (16, 8, 8), 2),
    "fused, with one key-value head": Shard((20, 6), 0, (16, 2, 2), 2),
    "vocabulary": Shard((97, 12), 0, pad_multiple=8),
    "gate": Shard((17, 10), 0, pad_multiple=1),
    "down": Shard((10, 17), 1, pad_multiple=1),
    "experts": Shard((5, 6, 7), 0),
    "columns of experts": Shard((3, 4, 9), 2),
    "bias": Shard((53,), 0),
    "bias of the vocabulary": Shard((97,), 0, pad_multiple=8),
}
WHOLE = {"norm": (11,), "replicated": (9, 5), "one": (1,), "kernel": (3, 4, 2, 3)}
SHAPES = {**{name: shard.shape for name, shard in SHARDS.items()}, **WHOLE}
OPTIMIZERS = {
    "fixed rate": {"optimizer": "adafactor", "lr": 0.1},
    "relative step": {"optimizer": "adafactor", "relative_step": True},
    "lamb": {"optimizer": "lamb", "lr": 0.1},
}


def values(step: int, name: str) -> torch.Tensor:
    """Weights for step 0, and gradients of the steps from 1, whose sizes vary so that some updates are clipped.

    One weight is large. So the parameter's scale is, and the updates of the others are not lost in their rounding.
    """
    generator = torch.Generator().manual_seed(1000 * step + sorted(SHAPES).index(name))
    value = torch.randn(SHAPES[name], generator=generator)
    if step:
        return value * 4.0 ** (step % 3 - 2)
    value *= 0.01
    value.view(-1)[0] = LARGE if value.numel() > 1 else value[0]
    return value


class Linear(nn.Module):
    """Its loss is linear in the weights, so that each step's gradients are the given ones to the bit."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        for name in SHAPES:
            shard = SHARDS.get(name)
            parameter = split_parameter(shard, mesh) if shard else nn.Parameter(torch.empty(SHAPES[name]))
            parameter.data.copy_(self.own(name, values(0, name)))
            self.register_parameter(name, parameter)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return SHARDS[name].slice(whole, self.mesh.tp_rank, self.mesh.tp_size) if name in SHARDS else whole

    def forward(self, step: int) -> torch.Tensor:
        return sum(
            (parameter * self.own(name, values(step, name))).sum() for name, parameter in self.named_parameters()
        )


def engine_of(mesh: Any, zero: int, **settings: Any) -> Any:
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.launch.ranks import Ranks
    from shardzoo.trainer.trainer import make_engine

    shared = {"env_type": "deepspeed+mpu", "clip_grad": 0.0, "train_steps": STEPS, "weight_decay": 0.1}
    arguments = TrainingArguments(**shared, zero_stage=zero, model_parallel_size=mesh.tp_size, **settings)
    model = Linear(mesh)
    return make_engine(model, make_optimizer(model, arguments), arguments, Ranks(mesh))


def take(engine: Any, mesh: Any, steps: range) -> None:
    for step in steps:
        # A power of two, so the sum over the replicas is exact.
        engine.forward_backward(lambda _, step=step: engine.model(step) / mesh.dp_size, 1)
        engine.step()


def later_state() -> dict[str, torch.Tensor]:
    """Adafactor's after 20000 steps, when the relative step is no longer tiny."""
    state = {}
    for name, shape in SHAPES.items():
        state[f"step/{name}"] = torch.tensor(20000)
        if len(shape) > 1:
            state[f"exp_avg_sq_row/{name}"] = values(99, name).square().mean(-1)
            state[f"exp_avg_sq_col/{name}"] = values(99, name).square().mean(-2)
        else:
            state[f"exp_avg_sq/{name}"] = values(99, name).square()
    return state


def updates(mesh: Any, zero: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's weights after ten steps."""
    engine = engine_of(mesh, zero, **settings)
    if settings.get("relative_step"):
        vectors = {f"exp_avg_sq/{name}" for name in SHAPES if len(SHAPES[name]) < 2}
        state = later_state()
        engine.load_counters({"applied_steps": 20000})
        engine.load_optimizer_tensors(
            {key: engine.module.own(key[11:], value) if key in vectors else value for key, value in state.items()}
        )
    take(engine, mesh, range(1, STEPS + 1))
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.close(whole=True)
    return weights


def all_updates(mesh: Any, zero: int) -> dict[str, Any]:
    return {name: updates(mesh, zero, settings) for name, settings in OPTIMIZERS.items()}


@pytest.fixture(scope="module")
def oracles() -> dict[str, dict[str, torch.Tensor]]:
    """The weights that the libraries' optimizers make of the whole parameters."""
    import pytorch_optimizer
    from transformers.optimization import Adafactor

    relative = {"relative_step": True, "scale_parameter": True, "warmup_init": True}
    makers = {
        "fixed rate": partial(Adafactor, lr=0.1, relative_step=False, scale_parameter=False),
        "relative step": partial(Adafactor, lr=None, **relative),
        "lamb": partial(pytorch_optimizer.Lamb, lr=0.1, betas=(0.9, 0.999)),
    }
    found = {}
    for kind, make in makers.items():
        weights = {name: nn.Parameter(values(0, name)) for name in SHAPES}
        groups = [
            {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": 0.1},
            {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = make(groups)
        if kind == "relative step":
            for key, value in later_state().items():
                state, name = key.split("/")
                optimizer.state[weights[name]][state] = value.item() if state == "step" else value
        for step in range(1, STEPS + 1):
            for name, weight in weights.items():
                weight.grad = values(step, name)
            optimizer.step()
        found[kind] = {name: weight.detach() for name, weight in weights.items()}
    return found


LAYOUTS = [
    (1, 1, 0),
    (1, 2, 1),
    (1, 3, 2),
    (2, 1, 0),
    (2, 2, 1),
    (2, 2, 2),
    (3, 1, 0),
    (3, 1, 1),
    (3, 1, 2),
    (4, 1, 0),
    (4, 1, 1),
    (4, 1, 2),
]


@pytest.mark.parametrize(("tp", "data", "zero"), LAYOUTS)
def test_ten_steps_are_those_of_whole_parameters(run_mesh, oracles, tp, data, zero):
    ranks = run_mesh(tp, partial(all_updates, zero=zero), data=data)
    for kind, oracle in oracles.items():
        for name, expected in oracle.items():
            parts = [rank[kind][name] for rank in ranks]
            for replica in range(data):
                mine = parts[replica * tp : (replica + 1) * tp]
                found = SHARDS[name].merge(mine) if name in SHARDS else mine[0]
                first = values(0, name)
                difference, update = found.double() - expected.double(), expected.double() - first.double()
                error = difference[first != LARGE].norm() / update[first != LARGE].norm()
                assert (difference.abs() < 1e-6 * expected.abs() + 1e-6).all()
                print("ERR", kind, "|", name, "|", float(error))
                assert error < 1e-6, (kind, name, float(error))
                if name not in SHARDS:
                    assert all(torch.equal(part, mine[0]) for part in mine)
