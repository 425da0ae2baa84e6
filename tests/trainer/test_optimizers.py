"""Optimizers that are not the trainer's own: what they keep is saved whole, wherever they keep it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import pytorch_optimizer
import torch
from every_case import by_turns
from safetensors.torch import load_file
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)
from training import losses, native_t5, run_training, tiny_t5


class Plain(torch.optim.Optimizer):
    """Keeps Python's own numbers, and nothing, as state."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["factor"] = state.get("factor", 1.0) / 3
            state["count"] = state.get("count", 0) + 1
            state["nothing"] = None
            assert (type(state["factor"]), type(state["count"])) == (float, int)
            parameter -= parameter.grad * (0.1 + state["factor"])


class Renamed(torch.optim.AdamW):
    """A user's own class, whose step counts are torch's."""


OPTIMIZERS = {
    "numbers as state": (Plain, "fp32"),
    "a subclass of torch's": (Renamed, "fp32"),
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "fp32"),
    "SGD with momentum": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "fp32",
    ),
    "Adagrad, whose state is there before the first step": (torch.optim.Adagrad, "bf16"),
    "NAdam": (torch.optim.NAdam, "bf16"),
    "Prodigy, which adapts its rate in its groups": (pytorch_optimizer.Prodigy, "fp32"),
}


@pytest.mark.parametrize("name", by_turns(OPTIMIZERS, 4))
def test_a_run_goes_on_byte_for_byte(tmp_path, name):
    make, precision = OPTIMIZERS[name]

    def train(folder: str, **arguments) -> list[float]:
        model = tiny_t5(0.1)
        updates = (make(model.parameters()), None)
        settings = {
            "precision": precision,
            "lr_schedule": "constant",
            "train_steps": 6,
            **arguments,
        }
        steps, _ = run_training(None, tmp_path / folder, model=model, updates=updates, **settings)
        return losses(steps)

    whole = train("whole", save_interval=3)
    assert (
        train("rest", load_dir=str(tmp_path / "whole" / "checkpoints" / "step-000003")) == whole[3:]
    )
    saved = [tmp_path / folder / "checkpoints" / "step-000006" for folder in ("whole", "rest")]
    for file in sorted(path.name for path in saved[0].iterdir()):
        assert Path(saved[0], file).read_bytes() == Path(saved[1], file).read_bytes(), file
    if precision == "bf16":
        states = load_file(saved[0] / "optimizer_00.safetensors")
        assert all(value.dtype == torch.float32 for value in states.values())


def test_groups_keep_what_an_optimizer_writes_and_not_what_the_user_chose(tmp_path):
    """A weight decay that is chosen anew counts; the factor that Prodigy has adapted goes on."""
    made = []

    def train(folder: str, weight_decay: float, **arguments) -> None:
        model = tiny_t5()
        made.append(pytorch_optimizer.Prodigy(model.parameters(), weight_decay=weight_decay))
        settings = {"lr_schedule": "constant", "train_steps": 3, **arguments}
        run_training(None, tmp_path / folder, model=model, updates=(made[-1], None), **settings)

    train("first", 0.0)
    train("second", 0.5, load_dir=str(tmp_path / "first"), train_steps=3)
    first, second = (optimizer.param_groups[0] for optimizer in made)
    assert first["d_numerator"] != 0
    for name in ("step", "d_hat", "d_numerator"):
        assert second[name] == first[name], name
    assert second["weight_decay"] == 0.5


SCHEDULERS = {
    "warm-up, then steps": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=2), MultiStepLR(o, [2, 4])], [2]
    ),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 3), MultiStepLR(o, [2, 5], 0.5)]),
    "one cycle": lambda o: OneCycleLR(o, max_lr=1e-2, total_steps=8),
}


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", by_turns(SCHEDULERS, 3))
def test_schedulers_of_torch_go_on(tmp_path, name, rate):
    def train(folder: str, **arguments) -> list[float]:
        model = tiny_t5()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate.clone() if isinstance(rate, torch.Tensor) else rate
        )
        updates = (optimizer, SCHEDULERS[name](optimizer))
        steps, _ = run_training(
            None, tmp_path / folder, model=model, updates=updates, train_steps=8, **arguments
        )
        return [(step["loss"], step["lr"]) for step in steps]

    whole = train("whole", save_interval=3)
    assert len({lr for _, lr in whole}) > 1
    assert (
        train("rest", load_dir=str(tmp_path / "whole" / "checkpoints" / "step-000003")) == whole[3:]
    )


def test_a_scheduler_takes_what_the_user_chooses_anew(tmp_path):
    """A lower rate, and a later end, than those of the run that went before."""

    def train(lr: float, total: int, steps: int) -> list[float]:
        model = tiny_t5()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        updates = (optimizer, LambdaLR(optimizer, lambda step: 1 - step / total))
        found, _ = run_training(
            None, tmp_path, model=model, updates=updates, train_steps=steps, resume=True
        )
        return [step["lr"] for step in found]

    assert train(1.0, 4, 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert train(0.1, 8, 6)[-1] == pytest.approx(0.1 * 3 / 8)


def test_a_run_does_not_go_on_with_another_optimizer_or_a_new_scheduler(tmp_path):
    run_training(None, tmp_path, train_steps=1)
    with pytest.raises(
        ValueError,
        match="the run was trained with AdamW and cannot resume with Lion; to start another run",
    ):
        run_training(None, tmp_path, train_steps=2, resume=True, optimizer="lion")
    model = tiny_t5()
    optimizer = torch.optim.AdamW(model.parameters())
    updates = (optimizer, MultiStepLR(optimizer, [2]))
    with pytest.raises(ValueError, match="without an lr_scheduler, and cannot resume with one"):
        run_training(None, tmp_path, model=model, updates=updates, train_steps=2, resume=True)


UNSAVEABLE = {
    "SOAP": "SOAP's GG is a list, which cannot be saved",
    "MADGRAD": "MADGRAD keeps 'k' as state, which cannot be saved",
    "AggMo": "AggMo's momentum_buffer is a dict, which cannot be saved",
}


@pytest.mark.parametrize("name", UNSAVEABLE)
def test_state_that_cannot_be_saved_is_refused_after_the_first_step(tmp_path, name):
    for save in (True, False):
        model = tiny_t5()
        updates = (getattr(pytorch_optimizer, name)(model.parameters()), None)
        settings = {"model": model, "updates": updates, "save_optim": save, "train_steps": 3}
        if save:
            with pytest.raises(ValueError, match=UNSAVEABLE[name]):
                run_training(None, tmp_path / "saved", **settings)
        else:
            steps, _ = run_training(None, tmp_path / "not", **settings)
            assert len(steps) == 3


def all_of(kind, model, **arguments):
    return kind(model.parameters(), **arguments)


def frozen_group(model):
    first, *rest = model.parameters()
    first.requires_grad_(False)
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}])


def first_half(model):
    return torch.optim.AdamW(list(model.parameters())[:4])


def whole_parameters(model):
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), relative_step=False, lr=1e-3)


def train_with(mesh, folder, make, **arguments):
    model = native_t5(mesh) if mesh.tp_size > 1 else tiny_t5()
    return run_training(
        mesh, folder, model=model, updates=(make(model), None), train_steps=2, **arguments
    )


UNSPLITTABLE = [
    (
        1,
        1,
        partial(all_of, torch.optim.AdamW, amsgrad=True),
        "amsgrad keeps a state that ZeRO stage 1 does not split",
    ),
    (
        1,
        1,
        frozen_group,
        "a parameter group of the optimizer has no trained parameter, but ZeRO stage 1 needs",
    ),
    (1, 3, first_half, "ZeRO stage 3 updates all parameters that require gradients"),
    (
        2,
        0,
        whole_parameters,
        "Adafactor may need whole parameters, which model_parallel_size=2 splits",
    ),
]


@pytest.mark.parametrize(("tp", "stage", "make", "message"), UNSPLITTABLE)
def test_optimizers_that_cannot_be_split_are_refused(run_mesh, tmp_path, tp, stage, make, message):
    environment = {
        "env_type": "deepspeed+mpu" if tp > 1 else "deepspeed",
        "model_parallel_size": tp,
    }
    work = partial(train_with, folder=tmp_path, make=make, zero_stage=stage, **environment)
    with pytest.raises(AssertionError, match=message):
        run_mesh(tp, work)


@pytest.mark.before_release
def test_scalars_of_a_split_model_go_on_unsplit(run_mesh, tmp_path):
    """NAdam keeps a product beside its moments, a scalar for each parameter."""
    make, environment = (
        partial(all_of, torch.optim.NAdam),
        {"env_type": "deepspeed+mpu", "zero_stage": 0},
    )
    split = partial(
        train_with, folder=tmp_path / "split", make=make, model_parallel_size=2, **environment
    )
    [(steps, _), _] = run_mesh(2, split)
    one = partial(
        native_alone,
        folder=tmp_path / "one",
        make=make,
        load_dir=str(tmp_path / "split"),
        **environment,
    )
    [(later, _)] = run_mesh(1, one)
    assert [step["step"] for step in later] == [3, 4]
    [(whole, _)] = run_mesh(
        1, partial(native_alone, folder=tmp_path / "whole", make=make, **environment)
    )
    assert losses(steps) + losses(later) == pytest.approx(losses(whole), rel=1e-5)


def native_alone(mesh, folder, make, **arguments):
    model = native_t5(mesh)
    return run_training(
        mesh, folder, model=model, updates=(make(model), None), train_steps=4, **arguments
    )


def test_another_number_of_groups_is_refused(tmp_path):
    model = tiny_t5()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    run_training(
        None, tmp_path, model=model, updates=(torch.optim.SGD(groups, lr=0.1), None), train_steps=1
    )
    updates = (torch.optim.SGD(groups[:2], lr=0.1), None)
    with pytest.raises(
        ValueError,
        match="optimizer had 47 parameter groups, and this one has 2; create it with the same",
    ):
        run_training(None, tmp_path, model=model, updates=updates, resume=True, train_steps=2)


def test_a_run_without_its_optimizer_cannot_go_on(tmp_path):
    run_training(None, tmp_path / "run", save_optim=False, train_steps=1)
    with pytest.raises(
        ValueError, match=r"without the optimizer's state .* load_dir, load_optim=False and another"
    ):
        run_training(None, tmp_path / "run", resume=True, train_steps=2)
    weights = {"load_dir": str(tmp_path / "run"), "load_optim": False}
    steps, _ = run_training(None, tmp_path / "other", train_steps=2, **weights)
    assert [step["step"] for step in steps] == [1, 2]


def test_state_that_an_optimizer_makes_of_a_16_bit_model_becomes_fp32():
    """Adagrad has its sums of squares before the first step. In bf16 a sum of ones stalls at 256.

    The oracle is PyTorch's Adagrad on an fp32 parameter. The gradients are bf16 numbers, so both see the same ones.
    """
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.torch_engine import TorchEngine

    model = torch.nn.Linear(3, 2, bias=False).bfloat16()
    plain = torch.nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    oracle = torch.optim.Adagrad([plain], lr=0.1)
    arguments = TrainingArguments(env_type="pytorch", precision="bf16", clip_grad=0.0)
    engine = TorchEngine(model, optimizer, arguments)
    gradient = torch.tensor([[1.0, -1.0, 0.5], [3.0, 0.25, 1.0]], dtype=torch.bfloat16)
    for _ in range(300):
        engine.backward((model.weight * gradient).sum())
        engine.step()
        plain.grad = gradient.float()
        oracle.step()
    found = engine.optimizer_tensors()
    assert found["sum/weight"].dtype == torch.float32
    assert torch.equal(found["sum/weight"], oracle.state[plain]["sum"])
    assert torch.equal(found["master_weight/weight"], plain)
    assert torch.equal(model.weight, plain.bfloat16())
