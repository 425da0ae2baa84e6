"""How often the host waits for the device: once in a step, counted on a CPU that passes for a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import native_t5, run_training

from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.launch.ranks import Ranks
from shardzoo.trainer.loop import TrainingLoop
from shardzoo.trainer.trainer import make_engine


class Reads(TorchDispatchMode):
    """Counts operators that wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
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
            losses = engine.forward_backward(lambda k: engine.model(torch.ones(2, 6, dtype=dtype)).sum(), 4)
            outcome = engine.step()
    assert losses.shape == (4,)
    assert outcome.grad_norm.shape == ()
    assert reads.count == 0


@pytest.fixture
def late(monkeypatch):
    """Lets the loop read as from a GPU, and counts what it reads: of losses, and of norms by themselves."""
    counts, prepare = Counter(), TrainingLoop.__post_init__
    read, check = TrainingLoop._read, TrainingLoop._check_norm

    def counted_read(loop, losses):
        counts["losses"] += 1
        return read(loop, losses)

    def counted_check(loop):
        counts["norms"] += loop._unread is not None and isinstance(loop._unread[1], torch.Tensor)
        check(loop)

    def pretend(loop):
        prepare(loop)
        loop._reads_late = True

    monkeypatch.setattr(TrainingLoop, "__post_init__", pretend)
    monkeypatch.setattr(TrainingLoop, "_read", counted_read)
    monkeypatch.setattr(TrainingLoop, "_check_norm", counted_check)
    return counts


def test_a_step_between_logs_is_read_once(late, tmp_path):
    reported, _ = run_training(None, tmp_path, model=native_t5, train_steps=12, log_interval=4, save_interval=6)
    assert [values["step"] for values in reported] == [4, 8, 12]
    assert late == {"losses": 12, "norms": 4}  # those of the logged steps and of the saved ones


def test_reading_late_changes_no_number(late, tmp_path):
    how = {"model": native_t5, "train_steps": 6, "gradient_accumulation_steps": 2}
    reported, weights = run_training(None, tmp_path / "late", log_interval=3, **how)
    assert late["norms"] == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_read", lambda loop, losses: losses.tolist())
        patch.setattr(TrainingLoop, "_check_norm", lambda loop: None)
        at_once, same = run_training(None, tmp_path / "at once", log_interval=1, **how)
    for values in reported:
        [other] = [step for step in at_once if step["step"] == values["step"]]
        assert (values["loss"], values["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def spoiled(mesh, step):
    """A gradient is infinite from this step on."""
    model, calls = native_t5(mesh), iter(range(1, 100))
    parameter = next(model.parameters())
    parameter.register_hook(lambda grad: grad * (float("inf") if next(calls) >= step else 1.0))
    return model


@pytest.mark.parametrize(("step", "interval"), [(2, 100), (3, 3), (4, 100)])
def test_a_norm_that_is_not_finite_is_named_before_anything_is_saved(late, tmp_path, step, interval):
    """Read with the next losses, or before a save, or before the last one."""
    how = {"clip_grad": 0.0, "train_steps": 4, "log_interval": 100, "save_interval": interval}
    with pytest.raises(FloatingPointError, match=f"the gradient norm is (inf|nan) at step {step}, where the loss is"):
        run_training(None, tmp_path, model=lambda mesh: spoiled(mesh, step), **how)
    assert not [path for path in tmp_path.rglob("step-*") if path.name >= f"step-{step:06d}"]
