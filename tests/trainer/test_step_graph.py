"""Steps that are queued as a CUDA graph, on a CPU that passes for a GPU: a recorder notes every operator of a step and
repeats them on the same memory. So a number that a step takes from the host when it is recorded shows in the next one.
"""

from __future__ import annotations

import math

import pytest
import torch
from every_case import every_day
from tiny_models import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import run_training

from shardzoo.models import config_from_dict, from_config, language_model, seq2seq
from shardzoo.models.blocks import embeddings
from shardzoo.mpu import token_ids
from shardzoo.ops import embedding
from shardzoo.trainer import TrainingArguments, step_graph
from shardzoo.trainer.engines.factory import make_engine
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.launch.ranks import Ranks
from shardzoo.trainer.step import TrainingStep
from shardzoo.trainer.step_graph import StepGraph

# What cannot be recorded: the host reads a result, or sends values that the graph would not read anew.
FORBIDDEN = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::lift_fresh")


class Recorder(TorchDispatchMode):
    """Notes the operators of a function. All of their tensors keep their memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in FORBIDDEN:
            raise RuntimeError(f"{func._schema.name} while a step is recorded")
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, results in self.calls:
            if func.is_view:
                continue
            fresh = func(*args, **kwargs)
            given = {id(tensor) for tensor in tree_leaves((args, kwargs))}
            for kept, value in zip(tree_leaves(results), tree_leaves(fresh), strict=True):
                if isinstance(kept, torch.Tensor) and id(kept) not in given:
                    assert kept.shape == value.shape, f"{func} depends on data"
                    kept.copy_(value)


def record(device, function):
    """Records a function, whose effects are undone: a GPU does not compute what it records."""
    recorder = Recorder()
    before = [[tensor, tensor.detach().clone()] for tensor in KEPT]
    with recorder:
        results = function()
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
    return recorder.replay, results


SHORT = 0  # the sample that is shorter than the others, which comes after the recorded step
TOLD: list[str] = []  # what the user is told
KEPT: list[
    torch.Tensor
] = []  # what a step changes: weights, their copies and the optimizer's states


def add_rows(total, ids, rows):
    """Adds rows without asking which of the ids are distinct, as an accelerator does."""
    return total.copy_(total.float().index_add(0, ids, rows.float()))


@pytest.fixture
def graphs(monkeypatch):
    """Lets the trainer take the CPU for a GPU; lists whether each step was a graph."""
    taken = []
    prepare = TrainingStep.__init__
    takes = StepGraph.takes
    compute = StepGraph._record

    def pretend(step, *parts):
        prepare(step, *parts)
        step.reads_late = True

    def note(graph, micro_batches):
        taken.append(takes(graph, micro_batches))
        return taken[-1]

    def compute_with_states(graph):
        optimizer = graph._engine.optimizer
        states = [t for state in optimizer.state.values() for t in state.values()]
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        KEPT[:] = [*states, *updated, *graph._engine.module.parameters()]
        return compute(graph)

    for module in (token_ids, seq2seq, language_model, embeddings):
        monkeypatch.setattr(module, "host_can_read", lambda _: False)
    monkeypatch.setattr(embedding, "add_rows", add_rows)
    monkeypatch.setattr(step_graph, "can_record_graphs", lambda _: True)
    monkeypatch.setattr(step_graph, "record_graph", record)
    monkeypatch.setattr(TrainingStep, "__init__", pretend)
    monkeypatch.setattr(StepGraph, "takes", note)
    monkeypatch.setattr(StepGraph, "_say", lambda graph, reason: TOLD.append(reason))
    TOLD.clear()
    monkeypatch.setattr(StepGraph, "_record", compute_with_states)
    return taken


def build(name):
    return from_config(config_from_dict(tiny(name, 0.1)), seed=0)


def make_samples(count, length=12):
    """Samples of one length; the labels of some are fewer, so that the steps have other numbers of targets."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        ids = torch.randint(5, 90, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 7] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def train(folder, name, **options):
    settings = {
        "train_steps": 7, "log_interval": 1, "lr": 0.01, "lr_schedule": "cosine", "warmup_steps": 2,
        "global_batch_size": 4, "micro_batch_size": 2, **options,
    }  # fmt: skip
    data = settings.pop("data", None) or make_samples(40)
    return run_training(None, folder, model=lambda mesh=None: build(name), data=data, **settings)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", every_day(["gpt2"], more=["llama", "bert", "t5", "glm"]))
def test_recorded_steps_are_those_of_the_loop(name, precision, graphs, tmp_path):
    expected, _ = train(tmp_path / "expected", name, precision=precision)
    assert graphs == []
    found, _ = train(tmp_path / "found", name, precision=precision, cuda_graph=True)
    assert (TOLD, graphs) == ([], [False, True, True, True, True, True, True])
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for a, b in zip(found, expected, strict=True):
        for key in ("step", "loss", "grad_norm", "lr"):
            assert a[key] == pytest.approx(b[key], rel=tolerance), (a["step"], key)


def test_steps_of_other_shapes_run_without_the_graph(graphs, tmp_path):
    data = make_samples(7)
    data[SHORT] = make_samples(1, length=9)[0]
    one = {"data": data, "global_batch_size": 1, "micro_batch_size": 1}
    expected, _ = train(tmp_path / "expected", "gpt2", **one)
    found, _ = train(tmp_path / "found", "gpt2", **one, cuda_graph=True)
    assert graphs[:3] == [False, True, True]
    assert graphs[3:].count(False) == 1
    assert TOLD == ["micro-batches have other shapes than the recorded ones (only such steps do)"]
    for a, b in zip(found, expected, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-5)


def test_a_step_that_cannot_be_recorded_is_computed(graphs, tmp_path, monkeypatch):
    def refuse(device, function):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    expected, _ = train(tmp_path / "expected", "gpt2")
    monkeypatch.setattr(step_graph, "record_graph", refuse)
    found, _ = train(tmp_path / "found", "gpt2", cuda_graph=True)
    assert graphs == [False, True, True, False, False, False, False]
    assert TOLD == ["it cannot be recorded: operation not permitted when stream is capturing"]
    assert [a["loss"] for a in found] == [b["loss"] for b in expected]


def test_a_recorded_loss_that_is_not_finite_is_named(graphs, tmp_path, monkeypatch):
    """One step later, when the next update was queued, which changes nothing either."""
    fill = StepGraph._fill
    weights = []

    def spoil(graph, *arguments):
        fill(graph, *arguments)
        weights.append(graph._engine.module.embedding.weight.detach().clone())
        if len(weights) == 4:
            graph._totals.fill_(math.nan)

    monkeypatch.setattr(StepGraph, "_fill", spoil)
    with pytest.raises(
        FloatingPointError, match="the loss is nan at step 5, from training samples"
    ):
        train(tmp_path, "gpt2", cuda_graph=True, log_interval=100)
    assert graphs == [False, True, True, True, True, True]
    assert not torch.equal(weights[2], weights[3])
    assert torch.equal(weights[3], weights[4])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "the model is on cpu, and only CUDA devices record graphs"),
        ({"precision": "fp16"}, "precision='fp16' with optimizer='adamw'"),
        ({"optimizer": "lion"}, "optimizer='lion'"),
        ({"recompute": "offload"}, "recompute='offload' copies to the host"),
    ],
)
def test_what_runs_without_a_graph_says_why(options, reason, monkeypatch):
    arguments = TrainingArguments(cuda_graph=True, **options)
    model = torch.nn.Linear(3, 3)
    engine = make_engine(model, make_optimizer(model, arguments), arguments, Ranks(None))
    if options:
        monkeypatch.setattr(step_graph, "can_record_graphs", lambda _: True)
    lines = []
    graph = StepGraph(arguments, engine, None, None, torch.device("cpu"), lines.append)
    [line] = lines
    assert line.startswith("cuda_graph: steps run without a CUDA graph, because ")
    assert reason in line
    assert not graph.takes([])


def test_a_graph_that_forgets_a_rate_is_caught(graphs, tmp_path, monkeypatch):
    """The comparison of the first test fails if a number is taken from the host."""
    monkeypatch.setattr(StepGraph, "_record", keep_rates(StepGraph._record))
    expected, _ = train(tmp_path / "expected", "gpt2")
    found, _ = train(tmp_path / "found", "gpt2", cuda_graph=True)
    assert found[2]["loss"] == pytest.approx(expected[2]["loss"], rel=1e-5)
    assert found[-1]["loss"] != pytest.approx(expected[-1]["loss"], rel=1e-5)


def keep_rates(record_step):
    def record_with_numbers(graph):
        graph._rates = graph._rates.clone()  # which `_fill` of later steps does not reach
        recorded = record_step(graph)
        graph._rates = torch.zeros_like(graph._rates)
        return recorded

    return record_with_numbers
