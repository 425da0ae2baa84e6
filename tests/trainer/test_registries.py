"""The entries of optimizers, schedules, precisions and engines say what is true, and are all that is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from training import losses, run_training, tiny_t5

from shardzoo.models.sizes import ParameterSize
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.arguments.deepspeed_file import OPTIMIZER_TYPES, SCHEDULE_TYPES
from shardzoo.trainer.engines import (
    ddp_engine,
    deepspeed_engine,
    fsdp_engine,
    pipeline_engine,
    torch_engine,
)
from shardzoo.trainer.engines.factory import make_engine
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.engines.schedule import make_schedule
from shardzoo.trainer.environments import ENVIRONMENTS
from shardzoo.trainer.estimate import Job
from shardzoo.trainer.estimate.estimate import state_bytes
from shardzoo.trainer.launch.ranks import Ranks
from shardzoo.trainer.optimizers import registry
from shardzoo.trainer.optimizers.registry import OPTIMIZERS, OptimizerEntry
from shardzoo.trainer.precisions import PRECISIONS
from shardzoo.trainer.schedules import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs"


def step_once(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    arguments = TrainingArguments()
    object.__setattr__(arguments, "optimizer", name)  # also one that is added after the import
    optimizer = make_optimizer(model, arguments)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", registry.ENTRIES_BY_NAME)
def test_an_optimizer_keeps_the_states_that_its_entry_says(name):
    entry = registry.find_optimizer(name)
    if entry.name == "adamw8bit":
        pytest.importorskip("torchao")
    model, optimizer = step_once(name)
    sizes = [ParameterSize("", tuple(p.shape), tuple(p.shape), False) for p in model.parameters()]
    tensors = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors.setdefault(key, []).append(value)
    if entry.element_states:
        assert set(tensors) == set(entry.element_states)
    held = sum(value.nbytes for values in tensors.values() for value in values)
    assert held == state_bytes(entry, sizes)
    if entry.class_names:
        assert type(optimizer).__name__ in entry.class_names


def test_the_docs_name_every_optimizer():
    trainer = (DOCS / "trainer.md").read_text()
    estimate = (DOCS / "estimate.md").read_text()
    for name in registry.ENTRIES_BY_NAME:
        assert f"`{name}`" in trainer
    for entry in OPTIMIZERS.values():
        states = 4 * len(entry.element_states) if entry.count_state_bytes is None else 0
        if entry.hidden_matrix_states is not None:
            states = f"{4 * len(entry.hidden_matrix_states)}; {states} outside of hidden matrices"
        row = rf"\| {entry.title} \| {states} \|" if states else rf"\| {entry.title} \|"
        assert re.search(row, estimate), entry.title


def read_docs_entry() -> OptimizerEntry:
    [code] = [
        block
        for block in re.findall(
            r"```python\n(.*?)```", (DOCS / "trainer.md").read_text(), re.DOTALL
        )
        if "OptimizerEntry(" in block
    ]
    names = {"OptimizerEntry": OptimizerEntry}
    exec(code, names)
    return names["entry"]


def test_the_docs_optimizer_is_added_by_its_entry(monkeypatch):
    """As docs/trainer.md shows it: arguments, engine and estimate know it then."""
    monkeypatch.setitem(registry.ENTRIES_BY_NAME, "sgd", read_docs_entry())
    _, optimizer = step_once("sgd")
    assert type(optimizer) is torch.optim.SGD
    assert Job(optimizer="sgd", zero_stage=3).stage == 3


def train_with_sgd(mesh, folder: Path, stage: int) -> list[float]:
    def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    entry = read_docs_entry()
    registry.ELEMENTWISE_CLASSES.update(dict.fromkeys(entry.class_names, entry))
    try:
        model = tiny_t5(0.0)
        own = (make_sgd(model), None)
        steps, _ = run_training(
            mesh, folder, model=model, updates=own, env_type="deepspeed", zero_stage=stage
        )
    finally:
        for name in entry.class_names:
            del registry.ELEMENTWISE_CLASSES[name]
    return losses(steps)


def test_zero_splits_an_optimizer_without_states(run_mesh, tmp_path):
    plain, split = [
        run_mesh(1, train_with_sgd, tmp_path / str(stage), stage, data=2)[0] for stage in (0, 2)
    ]
    assert len(set(plain)) == len(plain)
    assert split == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", ["sgd", "Adam", ""])
def test_an_unknown_name_is_refused_with_those_that_exist(name):
    names = "adamw, adam, adafactor, lion, adamw8bit, adamw_torch_8bit, lamb, muon"
    with pytest.raises(ValueError, match=f"optimizer must be one of {names}, not"):
        TrainingArguments(optimizer=name)
    with pytest.raises(
        ValueError, match="lr_schedule must be one of warmup_cosine, cosine, linear"
    ):
        TrainingArguments(lr_schedule=name)
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, not"):
        TrainingArguments(precision=name)
    with pytest.raises(
        ValueError, match="env_type must be one of pytorch, pytorchDDP, deepspeed, deepspeed\\+mpu"
    ):
        TrainingArguments(env_type=name)
    with pytest.raises(ValueError, match="use one of adamw, adam"):
        registry.find_optimizer(name)


ENGINES = {
    ("pytorch", 1): torch_engine.TorchEngine,
    ("pytorchDDP", 1): ddp_engine.DDPEngine,
    ("deepspeed", 1): deepspeed_engine.DeepSpeedEngine,
    ("deepspeed+mpu", 1): deepspeed_engine.DeepSpeedEngine,
    ("deepspeed+mpu", 2): pipeline_engine.PipelineEngine,
    ("fsdp", 1): fsdp_engine.FSDPEngine,
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_has_an_engine(name, stages, monkeypatch):
    for kind in set(ENGINES.values()):
        monkeypatch.setattr(kind, "__init__", lambda self, *arguments: None)
    ranks = Ranks(None)
    ranks.pp_size = stages
    arguments = TrainingArguments(env_type=name)
    if (name, stages) in ENGINES:
        made = make_engine(nn.Linear(1, 1), None, arguments, ranks, object())
        assert type(made) is ENGINES[name, stages]
    else:
        with pytest.raises(ValueError, match="with pipeline stages; use one of deepspeed"):
            make_engine(nn.Linear(1, 1), None, arguments, ranks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_needs_the_last_step_if_its_entry_says_so(name):
    entry = SCHEDULES[name]
    first, second = (entry.multiplier(2, total) for total in (20, 40))
    differ = any(first(step) != second(step) for step in range(2, 20))
    assert differ == entry.needs_last_step
    assert (first(0) < first(1)) == entry.warms_up
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    arguments = TrainingArguments(lr_schedule=name, warmup_steps=2)
    if entry.needs_last_step:
        with pytest.raises(ValueError, match="needs to know the last step"):
            make_schedule(None, optimizer, arguments, None)
    else:
        make_schedule(None, optimizer, arguments, None).before_step(1)


def test_precisions_are_those_of_torch():
    for name, precision in PRECISIONS.items():
        dtype = getattr(torch, precision.dtype)
        assert precision.itemsize == dtype.itemsize
        assert precision.needs_master_weights == (dtype != torch.float32)
        assert precision.scales_loss == (name == "fp16")


def test_deepspeeds_types_belong_to_one_entry_each():
    optimizer_types = [kind for entry in OPTIMIZERS.values() for kind in entry.deepspeed_types]
    assert len(optimizer_types) == len(OPTIMIZER_TYPES)
    schedule_types = [kind for entry in SCHEDULES.values() for kind in entry.deepspeed_types]
    assert len(schedule_types) == len(SCHEDULE_TYPES)
