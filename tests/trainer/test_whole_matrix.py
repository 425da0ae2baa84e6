"""Adafactor and LAMB update split parameters as the libraries' optimizers update them unsplit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import EVERY_CASE, every_day
from tiny_models import tiny
from torch import nn
from training import losses, on_ranks, run_training

from shardzoo.mpu import Shard
from shardzoo.mpu.parameter import split_parameter

STEPS = 10
LARGE = 12.0  # above LAMB's limit of 10
SHARDS = {
    "square": Shard((24, 24), 0),
    "wide": Shard((5, 50), 1),
    "tall, in odd parts": Shard((53, 7), 0),
    "fused": Shard((32, 9), 0, (16, 8, 8), 2),
    "fused, with one key-value head": Shard((20, 6), 0, (16, 2, 2), 2, shared_kv_groups=(1, 2)),
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
            parameter = (
                split_parameter(shard, mesh) if shard else nn.Parameter(torch.empty(SHAPES[name]))
            )
            parameter.data.copy_(self.own(name, values(0, name)))
            self.register_parameter(name, parameter)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return (
            SHARDS[name].slice(whole, self.mesh.tp_rank, self.mesh.tp_size)
            if name in SHARDS
            else whole
        )

    def forward(self, step: int) -> torch.Tensor:
        return sum(
            (parameter * self.own(name, values(step, name))).sum()
            for name, parameter in self.named_parameters()
        )


def engine_of(mesh: Any, zero: int, **settings: Any) -> Any:
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.factory import make_engine
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.launch.ranks import Ranks

    shared = {
        "env_type": "deepspeed+mpu",
        "clip_grad": 0.0,
        "train_steps": STEPS,
        "weight_decay": 0.1,
    }
    arguments = TrainingArguments(
        **shared, zero_stage=zero, model_parallel_size=mesh.tp_size, **settings
    )
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
            {
                key: engine.module.own(key[11:], value) if key in vectors else value
                for key, value in state.items()
            }
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


# tensor-parallel, data-parallel, ZeRO. `make test-all` runs all that eight processes can.
LAYOUTS = [(1, 3, 2), (3, 1, 0)]
if EVERY_CASE:
    LAYOUTS = [
        (1, 3, 2),
        *((tp, data, zero) for tp in (1, 2, 3, 4) for data in (1, 2) for zero in (0, 1, 2)),
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
                difference, update = (
                    found.double() - expected.double(),
                    expected.double() - first.double(),
                )
                error = difference[first != LARGE].norm() / update[first != LARGE].norm()
                assert (difference.abs() < 1e-6 * expected.abs() + 1e-6).all()
                assert error < 1e-6, (kind, name, float(error))
                if name not in SHARDS:
                    assert all(torch.equal(part, mine[0]) for part in mine)


RUNS = {
    "adafactor": {"optimizer": "adafactor", "lr": 0.05, "scale_parameter": True},
    "lamb": {"optimizer": "lamb", "lr": 0.02},
}


class Tokens:
    """Unequal lengths, and unequal numbers of targets in the micro-batches."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8 + index % 5) * (index % 11 + 1) + index) % 13
        labels = tokens.clone()
        labels[: index % 7] = -100
        return {"input_ids": tokens, "labels": labels}


def gpt2(mesh: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Five heads and an inner width of 51, which ranks share unequally, and a padded vocabulary."""
    from shardzoo.models import from_config

    return from_config(
        tiny("gpt2", 0.1, vocab_size=97, n_embd=30, n_head=5, n_inner=51), mesh, dtype=dtype
    ).train()


@pytest.fixture
def train(run_mesh, tmp_path):
    """Returns the losses of eight steps, with clipping and accumulation; or those after the fourth of a saved run."""

    def run(
        folder: str,
        tp: int = 1,
        data: int = 1,
        stages: int = 1,
        start: str | None = None,
        **settings,
    ) -> list:
        if start:
            settings["load_dir"] = str(Path(tmp_path, start, "checkpoints", "step-000004"))
        shared = {
            "env_type": "deepspeed+mpu",
            "train_steps": 8,
            "save_interval": 4,
            "clip_grad": 0.5,
            "warmup_steps": 2,
        }
        sizes = {
            "model_parallel_size": tp,
            "pipeline_parallel_size": stages,
            "tp": tp,
            "stages": stages,
        }
        batches = {
            "micro_batch_size": 4 // data,
            "global_batch_size": 8,
            "data_ranks": data,
            "data": Tokens(),
        }
        dtype = torch.bfloat16 if settings.get("precision") == "bf16" else torch.float32
        model = partial(gpt2, dtype=dtype)
        ranks = on_ranks(
            run_mesh, tmp_path / folder, model=model, **shared, **sizes, **batches, **settings
        )
        return losses(ranks[0][0])

    return run


@pytest.mark.before_release
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_goes_on_in_every_layout(train, kind):
    whole = train("whole", zero_stage=0, **RUNS[kind])
    assert whole[-1] < whole[0] - 0.2
    split = train("split", 2, 2, zero_stage=2, **RUNS[kind])
    assert split == pytest.approx(whole, rel=1e-5)
    assert train("same", 2, 2, start="split", zero_stage=2, **RUNS[kind]) == split[4:]
    for folder, layout, start in (("stages", (1, 2, 2), "split"), ("three", (3, 1, 1), "whole")):
        assert train(folder, *layout, start=start, zero_stage=1, **RUNS[kind]) == pytest.approx(
            whole[4:], rel=1e-5
        )


@pytest.mark.before_release
@pytest.mark.parametrize(
    ("kind", "stages", "zero"), every_day([("adafactor", 2, 1)], more=[("lamb", 1, 2)])
)
def test_master_weights_resume_bit_for_bit(train, kind, stages, zero):
    settings = {**RUNS[kind], "precision": "bf16", "zero_stage": zero}
    whole = train("whole", 2, 3 - stages, stages, **settings)
    assert train("rest", 2, 3 - stages, stages, start="whole", **settings) == whole[4:]
    assert whole[-1] < whole[0] - 0.2


def test_zero_splits_models_of_transformers(run_mesh, tmp_path):
    """A run of the library's optimizer goes on under ZeRO, on the CPU, and then in one process again."""
    settings = {"global_batch_size": 9, "lr_schedule": "constant", **RUNS["adafactor"]}
    start = {
        "load_dir": str(tmp_path / "whole" / "checkpoints" / "step-000002"),
        "save_interval": 2,
    }
    zero = {
        "env_type": "deepspeed",
        "zero_stage": 2,
        "offload_optimizer": True,
        "data_ranks": 3,
        "micro_batch_size": 1,
    }
    whole, _ = run_training(
        None, tmp_path / "whole", train_steps=6, save_interval=2, micro_batch_size=3, **settings
    )
    [(split, _), *_] = on_ranks(
        run_mesh, tmp_path / "split", train_steps=4, **start, **settings, **zero
    )
    assert losses(split) == pytest.approx(losses(whole)[2:4], rel=1e-5)
    start["load_dir"] = str(tmp_path / "split")
    last, _ = run_training(
        None, tmp_path / "last", train_steps=6, micro_batch_size=3, **start, **settings
    )
    assert losses(last) == pytest.approx(losses(whole)[4:], rel=1e-5)


def spoiled(mesh: Any) -> Any:
    """The gradients of the position embeddings are NaN from the second step."""
    model, calls = gpt2(mesh), iter(range(100))
    positions = next(
        parameter
        for name, parameter in model.named_parameters()
        if "wpe" in name or "position" in name
    )
    positions.register_hook(lambda grad: grad * (float("nan") if next(calls) else 1.0))
    return model


@pytest.mark.parametrize(("optimizer", "zero"), [("adamw", 1), ("adafactor", 2)])
def test_gradients_that_are_not_finite_end_a_run(run_mesh, tmp_path, optimizer, zero):
    how = {
        "env_type": "deepspeed+mpu",
        "model_parallel_size": 2,
        "zero_stage": zero,
        "optimizer": optimizer,
    }
    with pytest.raises(
        AssertionError, match=r"the gradient norm is (nan|inf) at step 2, where the loss is"
    ):
        on_ranks(run_mesh, tmp_path, tp=2, data_ranks=2, model=spoiled, data=Tokens(), **how)
