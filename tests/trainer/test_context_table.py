"""Curves of 20 steps over families, exchanges and layouts of context parallelism are those of one process.

Oracle: one process with the same global batches; its final weights too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_case import by_turns
from tiny_models import tiny
from training import Pairs, losses, run_training

STEPS = 20
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "mistral": {},
    "bert": {"architecture": "BertForMaskedLM"},
    "modernbert": {"architecture": "ModernBertForMaskedLM"},
    "t5": {},
    "mt5": {},
    "bart": {},
    "glm": {},
}
# Sizes of the mesh, and arguments.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp2 heads": ({"context": 2}, {"context_exchange": "heads"}),
    "cp2 keys": ({"context": 2}, {"context_exchange": "keys", "env_type": "pytorchDDP"}),
    "cp2 ring": ({"context": 2}, {"context_exchange": "ring"}),
    "cp4 heads": ({"context": 4}, {"context_exchange": "heads"}),
    "cp4 ring": ({"context": 4}, {"context_exchange": "ring"}),
    "cp2 tp2": ({"context": 2, "tensor": 2}, {"sequence_parallel": True}),
    "cp2 dp2": ({"context": 2, "data": 2}, {"context_exchange": "keys", "zero_stage": 2}),
    "cp2 pp2": ({"context": 2, "pipeline": 2}, {"global_batch_size": 8, "micro_batch_size": 4}),
    "cp2 bf16": ({"context": 2}, {"precision": "bf16"}),
}


class Prefixed(Pairs):
    """The samples of GLM, whose mask is the length of the prefix."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "attention_mask": torch.tensor(1 + index % 3)}


def train(mesh: Any, folder: Any, family: str, **arguments: Any) -> Any:
    """Losses and final weights of a run on ragged samples with dropout."""
    from shardzoo.models import ParallelConfig, from_config

    config = tiny(family, 0.1, **FAMILIES[family])
    parallel = ParallelConfig(
        arguments.get("sequence_parallel", False),
        context_exchange=arguments.get("context_exchange", "auto"),
    )
    settings: dict[str, Any] = {"env_type": "deepspeed+mpu", "micro_batch_size": 8, "lr": 1e-3}
    steps, weights = run_training(
        mesh,
        folder,
        model=lambda mesh: from_config(config, mesh, parallel_config=parallel, seed=2).train(),
        data=Prefixed() if family == "glm" else Pairs(),
        train_steps=STEPS,
        **{**settings, **arguments},
    )
    return losses(steps), weights


def compare(mesh: Any, folder: Any, family: str, whole: Any, **arguments: Any) -> Any:
    """The losses, and the largest difference of a weight to this rank's part of the whole one."""
    from shardzoo.models import from_config

    found, weights = train(mesh, folder, family, **arguments)
    largest = 0.0
    model = from_config(tiny(family, 0.1, **FAMILIES[family]), mesh, seed=2)
    for name, parameter in model.named_parameters():
        own = weights[name]
        wanted = whole[name]
        shard = getattr(parameter, "shard", None)
        if shard is not None and mesh.tp_size > 1:
            wanted = wanted[tuple(slice(0, size) for size in shard.shape)]
            wanted = shard.slice(wanted, mesh.tp_rank, mesh.tp_size)
        largest = max(largest, float((own.float() - wanted.float()).abs().max()))
    return found, largest


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """`in_one_process(family, precision)`: its losses and weights."""
    made: dict[tuple[str, str], Any] = {}

    def get(family: str, precision: str) -> Any:
        name = (family, precision)
        if name not in made:
            folder = tmp_path_factory.mktemp(family)
            made[name] = train(None, folder, family, env_type="pytorch", precision=precision)
        return made[name]

    return get


CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]


@pytest.mark.before_release
@pytest.mark.parametrize(("family", "layout"), by_turns(CASES, len(CASES)))
def test_twenty_steps_are_those_of_one_process(in_one_process, run_mesh, tmp_path, family, layout):
    sizes, arguments = LAYOUTS[layout]
    precision = arguments.get("precision", "fp32")
    expected, weights = in_one_process(family, precision)
    arguments = {"context_parallel_size": sizes["context"], **arguments}
    if "tensor" in sizes:
        arguments["model_parallel_size"] = sizes["tensor"]
    if "pipeline" in sizes:
        arguments["pipeline_parallel_size"] = sizes["pipeline"]
    if "data" in sizes:
        arguments["micro_batch_size"] = 4
    results = run_mesh(
        sizes.get("tensor", 1),
        compare,
        tmp_path / "split",
        family,
        weights,
        context=sizes["context"],
        data=sizes.get("data", 1),
        pipeline=sizes.get("pipeline", 1),
        **arguments,
    )
    for own, largest in results:
        if precision == "bf16":
            assert own == pytest.approx(expected, rel=2e-2)
            continue
        assert own == pytest.approx(expected, abs=1e-5)
        assert largest < 1e-5
