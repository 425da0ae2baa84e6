"""How often the host waits for the device: once in a step, counted on a CPU that passes for a GPU."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from every_case import by_turns
from tiny_models import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from training import native_t5, run_training

from shardzoo.models import config_from_dict, from_config
from shardzoo.models.language_model import note_target_count
from shardzoo.mpu import dropout_state
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.batches.loss_normalization import to_device
from shardzoo.trainer.engines.factory import make_engine
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.launch.ranks import Ranks
from shardzoo.trainer.step import TrainingStep


class Reads(TorchDispatchMode):
    """Counts operators that wait for the device."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.count = (
            names or ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero"),
            0,
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self.names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_an_engine_reads_nothing(precision, clip_grad):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = torch.nn.Linear(6, 5).to(dtype)
    arguments = TrainingArguments(precision=precision, clip_grad=clip_grad)
    engine = make_engine(model, make_optimizer(model, arguments), arguments, Ranks(None))
    with Reads() as reads:
        for _ in range(3):
            losses = engine.forward_backward(
                lambda k: engine.model(torch.ones(2, 6, dtype=dtype)).sum(), 4
            )
            outcome = engine.step()
    assert losses.shape == (4,)
    assert outcome.grad_norm.shape == ()
    assert reads.count == 0


@pytest.mark.parametrize("labeled", [0, 1, 5, 21])
def test_a_head_of_few_positions_learns_their_number_from_the_trainer(labeled):
    """Masked words, whose number a GPU would have to tell the host."""
    model = from_config(
        config_from_dict(tiny("bert", 0.0, architectures=["BertForMaskedLM"])), seed=0
    )
    labels = torch.full((3, 7), -100)
    labels.view(-1)[torch.randperm(21)[:labeled]] = 5
    ids = torch.randint(5, 30, (3, 7))
    results = []
    for noted in (False, True):
        model.zero_grad()
        if noted:
            note_target_count(
                labels, to_device({"labels": labels}, torch.device("meta"))["labels"].target_count
            )
        with Reads("aten::nonzero") as reads:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=7).loss
            loss.backward()
        grads = (torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())
        results.append([loss.detach(), *grads])
        assert reads.count == (not noted)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def sum_of_ones(engine, dtype, factor, k):
    return engine.model(torch.ones(2, 6, dtype=dtype)).sum() * factor


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_skipped_step_changes_neither_weights_nor_states(precision):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    arguments = TrainingArguments(precision=precision)
    results = []
    for spoils in (
        [0.0, 0.0],
        [0.0, 2.0, 0.0],
        [0.0, math.nan, 0.0],
    ):  # NaN: in the gradients, and not in `found_inf`
        model = torch.nn.Linear(6, 5).to(dtype)
        torch.nn.init.constant_(model.weight, 0.3)
        torch.nn.init.constant_(model.bias, 0.3)
        engine = make_engine(model, make_optimizer(model, arguments), arguments, Ranks(None))
        assert engine.takes_found_inf
        for found_inf in spoils:
            spoiled = math.isnan(found_inf)
            loss = partial(sum_of_ones, engine, dtype, found_inf if spoiled else 1.0 + found_inf)
            engine.forward_backward(loss, 1)
            engine.step(torch.tensor(0.0 if spoiled else found_inf))
        results.append({**engine.model_tensors(), **engine.optimizer_tensors()})
    for skipped in results[1:]:
        assert skipped.keys() == results[0].keys()
        assert all(torch.equal(tensor, skipped[name]) for name, tensor in results[0].items())


@pytest.mark.parametrize("how", [{"precision": "fp16"}, {"optimizer": "lion"}])
def test_what_cannot_skip_an_update_says_so(how):
    model, arguments = torch.nn.Linear(6, 5), TrainingArguments(**how)
    assert not make_engine(
        model, make_optimizer(model, arguments), arguments, Ranks(None)
    ).takes_found_inf


@pytest.fixture
def late(monkeypatch):
    """Lets the loop read as from a GPU; lists the steps that it reads, each with the updates queued by then."""
    reads = []
    prepare = TrainingStep.__init__
    read = TrainingStep.read_pending

    def counted_read(step):
        if step.pending is not None:
            reads.append((step.pending.number, step.engine.applied_steps))
        read(step)

    def pretend(step, *parts):
        prepare(step, *parts)
        step.reads_late = True

    monkeypatch.setattr(TrainingStep, "__init__", pretend)
    monkeypatch.setattr(TrainingStep, "read_pending", counted_read)
    return reads


def test_a_step_between_logs_is_read_once_after_the_next_was_queued(late, tmp_path):
    reported, _ = run_training(
        None, tmp_path, model=native_t5, train_steps=12, log_interval=4, save_interval=6
    )
    assert [values["step"] for values in reported] == [4, 8, 12]
    assert all(values["seconds"] > 0 for values in reported)
    at_once = (4, 6, 8, 12)  # logged or saved
    assert late == [(step, step if step in at_once else step + 1) for step in range(1, 13)]


def test_a_loss_is_read_before_an_update_that_cannot_be_skipped(late, tmp_path):
    run_training(None, tmp_path, model=native_t5, train_steps=4, log_interval=4, optimizer="lion")
    assert late == [(1, 1), (2, 2), (3, 3), (4, 4)]  # their gradient norms, before the next update


@pytest.mark.parametrize("data", by_turns([1, 2], 2))
def test_reading_late_changes_no_number(tmp_path, run_mesh, data):
    how = {"model": native_t5, "train_steps": 6, "gradient_accumulation_steps": 2}
    if data == 1:
        runs = late_and_at_once(None, tmp_path, how)
        assert_same(*runs)
        return
    for runs in run_mesh(
        1, late_and_at_once, tmp_path, {**how, "env_type": "pytorchDDP"}, data=data
    ):
        assert_same(*runs)


def late_and_at_once(mesh, folder, how):
    prepare = TrainingStep.__init__

    def pretend(step, *parts):
        prepare(step, *parts)
        step.reads_late = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__init__", pretend)
        late = run_training(mesh, folder / "late", log_interval=3, **how)
    return late, run_training(mesh, folder / "at once", log_interval=1, **how)


def assert_same(late, at_once):
    (reported, weights), (all_reported, same) = late, at_once
    for values in reported:
        [other] = [step for step in all_reported if step["step"] == values["step"]]
        assert (values["loss"], values["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def poisoned(mesh, step, weights):
    """The samples of one step make a block's output NaN. `weights` gets those of each pass in which they do."""
    model = native_t5(mesh)
    block = next(module for name, module in model.named_modules() if name.endswith("blocks.0"))

    def spoil(module, inputs, output):
        key = dropout_state.capture()
        if key.first_sample // 2 != step - 1:
            return output
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        return torch.utils._pytree.tree_map(lambda x: x * math.nan, output)

    block.register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("interval", [3, 100])
def test_a_loss_that_is_not_finite_is_named_with_its_own_samples(late, tmp_path, interval):
    """Though the next step was queued before the host knew. The cause is looked for with the weights that it had."""
    weights = []
    how = {"train_steps": 6, "log_interval": 100, "save_interval": interval}
    with pytest.raises(
        FloatingPointError,
        match="the loss is nan at step 3, from training samples 4 to 5 on rank 0",
    ):
        run_training(None, tmp_path, model=lambda mesh: poisoned(mesh, 3, weights), **how)
    assert late[-1] == (3, 3 if interval == 3 else 4)
    before, *repeated = weights
    assert repeated
    assert all(torch.equal(a, b) for again in repeated for a, b in zip(before, again, strict=True))
    assert not [path for path in tmp_path.rglob("step-*") if path.name >= "step-000003"]


def spoiled(mesh, step):
    """A gradient is infinite from this step on."""
    model, calls = native_t5(mesh), iter(range(1, 100))
    parameter = next(model.parameters())
    parameter.register_hook(lambda grad: grad * (float("inf") if next(calls) >= step else 1.0))
    return model


@pytest.mark.parametrize(("step", "interval"), [(2, 100), (3, 3), (4, 100)])
def test_a_norm_that_is_not_finite_is_named_before_anything_is_saved(
    late, tmp_path, step, interval
):
    """Read with the next losses, or before a save, or before the last one."""
    how = {"clip_grad": 0.0, "train_steps": 4, "log_interval": 100, "save_interval": interval}
    with pytest.raises(
        FloatingPointError,
        match=f"the gradient norm is (inf|nan) at step {step}, where the loss is",
    ):
        run_training(None, tmp_path, model=lambda mesh: spoiled(mesh, step), **how)
    assert not [path for path in tmp_path.rglob("step-*") if path.name >= f"step-{step:06d}"]
