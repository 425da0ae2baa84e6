"""Muon updates split matrices as `torch.optim.Muon` updates whole ones, and computes each of them once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_case import every_day
from tiny_models import tiny
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import losses, native_t5, on_ranks

from shardzoo.mpu.parameter import split_parameter
from shardzoo.trainer.optimizers.muon import deal_matrices

STEPS = 10
FAMILIES = ("gpt2", "llama", "t5", "bert")
SETTINGS = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "train_steps": STEPS}
LAYERS = 4


def describe(family: str) -> dict[str, Any]:
    """The parameters of a family: name -> shape, shard, and whether Muon updates it."""
    from shardzoo.models.auto import as_config, build_on_meta
    from shardzoo.models.sizes import find_hidden_matrices

    model = build_on_meta(as_config(tiny(family, layers=LAYERS)), None)
    hidden = find_hidden_matrices(model)
    found = {}
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "shard", None)
        found[name] = (tuple(shard.shape if shard else parameter.shape), shard, parameter in hidden)
    return found


def values(step: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight for step 0, and the gradients of the steps from 1."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(shape, generator=generator) * (0.1 if step else 0.01)


class Block(nn.Module):
    """Its loss is linear in its parameters, so that their gradients are the given ones to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[tuple[str, int, tuple[int, ...], Any]] = []

    def add(self, mesh: Any, number: int, shape: tuple[int, ...], shard: Any) -> None:
        name = f"p{number}"
        parameter = split_parameter(shard, mesh) if shard else nn.Parameter(torch.empty(shape))
        parameter.data.copy_(cut(mesh, shard, values(0, number, shape)))
        self.register_parameter(name, parameter)
        self.own.append((name, number, shape, shard))

    def forward(self, mesh: Any, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, number, shape, shard in self.own:
            gradient = cut(mesh, shard, values(step, number, shape))
            total = total + (getattr(self, name) * gradient).sum()
        return total


def cut(mesh: Any, shard: Any, whole: torch.Tensor) -> torch.Tensor:
    return shard.slice(whole, mesh.tp_rank, mesh.tp_size) if shard else whole


class Model(nn.Module):
    """The parameters of a family, those of its hidden layers in two blocks."""

    def __init__(self, mesh: Any, family: str) -> None:
        super().__init__()
        self.mesh = mesh
        self.blocks = nn.ModuleList([Block(), Block()])
        self.rest = Block()
        for number, (shape, shard, is_hidden) in enumerate(describe(family).values()):
            block = self.blocks[number % 2] if is_hidden else self.rest
            block.add(mesh, number, shape, shard)

    def forward(self, step: int) -> torch.Tensor:
        return sum(block(self.mesh, step) for block in (*self.blocks, self.rest))


def update(mesh: Any, family: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns this rank's weights after ten steps, and the operations of the last update."""
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.factory import gather_parameters, make_engine, shard_model
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.launch.ranks import Ranks

    settings = TrainingArguments(
        **SETTINGS, clip_grad=0.0, model_parallel_size=mesh.tp_size, **arguments
    )
    ranks = Ranks(mesh)
    model = Model(mesh, family)
    sharded = shard_model(model, settings, ranks, None)
    engine = make_engine(model, make_optimizer(model, settings), settings, ranks, sharded)
    for step in range(1, STEPS + 1):
        engine.forward_backward(lambda _, step=step: engine.model(step) / mesh.dp_size, 1)
        with FlopCounterMode(display=False) as counter:
            engine.step()
    engine.close(whole=True)
    gather_parameters(model)
    weights = {name.rpartition(".")[2]: p.detach().clone() for name, p in model.named_parameters()}
    return weights, counter.get_total_flops()


def list_matrices(whole: torch.Tensor, shard: Any) -> list[torch.Tensor]:
    """The stacked matrices of a weight, as parameters of their own."""
    if shard is None or len(shard.groups) == 1:
        return [whole]
    return list(whole.split(list(shard.groups), shard.dim))


@pytest.fixture(scope="module")
def oracle():
    found: dict[str, Any] = {}

    def compute(family: str) -> dict[str, torch.Tensor]:
        if family in found:
            return found[family]
        parameters = describe(family)
        pieces: dict[int, list[nn.Parameter]] = {}
        groups: dict[str, list[nn.Parameter]] = {"muon": [], "decays": [], "rest": []}
        for number, (shape, shard, is_hidden) in enumerate(parameters.values()):
            whole = values(0, number, shape)
            parts = list_matrices(whole, shard) if is_hidden else [whole]
            pieces[number] = [nn.Parameter(part.clone().contiguous()) for part in parts]
            kind = "muon" if is_hidden else "decays" if len(shape) > 1 else "rest"
            groups[kind] += pieces[number]
        muon = torch.optim.Muon(
            groups["muon"], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(
            [
                {"params": groups["decays"], "weight_decay": 0.1},
                {"params": groups["rest"], "weight_decay": 0.0},
            ],
            lr=0.02,
        )
        for step in range(1, STEPS + 1):
            for number, (shape, shard, is_hidden) in enumerate(parameters.values()):
                gradient = values(step, number, shape)
                parts = list_matrices(gradient, shard) if is_hidden else [gradient]
                for parameter, part in zip(pieces[number], parts, strict=True):
                    parameter.grad = part.clone().contiguous()
            muon.step()
            adamw.step()
        weights = {}
        for number, (_, shard, _) in enumerate(parameters.values()):
            dim = shard.dim if shard else 0
            weights[f"p{number}"] = torch.cat([p.detach() for p in pieces[number]], dim)
        found[family] = weights
        return weights

    return compute


LAYOUTS = {
    "TP 2": (2, 1, {"env_type": "deepspeed+mpu", "zero_stage": 0}),
    "TP 3": (3, 1, {"env_type": "deepspeed+mpu", "zero_stage": 0}),
    "TP 4": (4, 1, {"env_type": "deepspeed+mpu", "zero_stage": 0}),
    "DDP 2": (1, 2, {"env_type": "pytorchDDP"}),
    "FSDP 2": (1, 2, {"env_type": "fsdp"}),
    "FSDP 4": (1, 4, {"env_type": "fsdp"}),
    "FSDP of two replicas": (1, 4, {"env_type": "fsdp", "fsdp_replicas": 2}),
    "TP 2, FSDP 2": (2, 2, {"env_type": "fsdp"}),
    "ZeRO 1 of 4": (1, 4, {"env_type": "deepspeed", "zero_stage": 1}),
    "TP 2, ZeRO 1 of 2": (2, 2, {"env_type": "deepspeed+mpu", "zero_stage": 1}),
}
EVERY_DAY = [("bert", "TP 2")]
MORE = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if (family, layout) not in EVERY_DAY
]


@pytest.mark.before_release
def test_whole_matrices_are_updated_as_torch_does(run_mesh, oracle):
    for family in FAMILIES:
        [(weights, _)] = run_mesh(1, update, family, {"env_type": "pytorch"})
        assert_same(weights, oracle(family), family, 0, 1)


def assert_same(weights, reference, family, rank, size):
    shards = {f"p{k}": entry[1] for k, entry in enumerate(describe(family).values())}
    assert weights.keys() == reference.keys()
    for name, value in weights.items():
        whole = reference[name]
        expected = shards[name].slice(whole, rank, size) if shards[name] else whole
        updates = (whole - values(0, int(name[1:]), tuple(whole.shape))).abs().max()
        assert (value - expected).abs().max() <= 1e-6 * updates, name


@pytest.mark.parametrize(("family", "layout"), every_day(EVERY_DAY, more=MORE))
def test_split_matrices_are_updated_like_whole_ones(run_mesh, oracle, family, layout):
    tp, ranks, arguments = LAYOUTS[layout]
    results = run_mesh(tp, update, family, arguments, data=ranks)
    for number, (weights, _) in enumerate(results):
        assert_same(weights, oracle(family), family, number % tp, tp)
    if tp * ranks == 4:
        [(_, whole)] = run_mesh(1, update, family, {"env_type": "pytorch"})
        assert max(flops for _, flops in results) <= 0.3 * whole
        assert sum(flops for _, flops in results) == whole


def test_matrices_are_dealt_evenly():
    assert deal_matrices([(4, 4)] * 6, 3) == [0, 1, 2, 0, 1, 2]
    owners = deal_matrices([(64, 256), (64, 64), (64, 64), (64, 64), (8, 8)], 2)
    assert owners[0] not in owners[1:3]


@pytest.mark.parametrize("layout", ["TP 2", *every_day([], more=["FSDP 2", "ZeRO 1 of 4"])])
def test_a_run_goes_on_under_another_layout(run_mesh, tmp_path, layout):
    settings = {
        "model": native_t5,
        "optimizer": "muon",
        "lr": 5e-3,
        "train_steps": 4,
        "global_batch_size": 8,
    }
    [(whole, _)] = on_ranks(run_mesh, tmp_path / "one", save_interval=2, **settings)
    assert losses(whole)[-1] < losses(whole)[0]
    saved = str(tmp_path / "one" / "checkpoints" / "step-000002")
    tp, ranks, arguments = LAYOUTS[layout]
    for steps, _ in on_ranks(
        run_mesh, tmp_path / "split", tp=tp, data_ranks=ranks, load_dir=saved,
        model_parallel_size=tp, **arguments, **settings,
    ):  # fmt: skip
        # The iteration rounds to bf16, so that the order of sums in a gradient shows.
        assert losses(steps) == pytest.approx(losses(whole)[2:], rel=1e-3)
