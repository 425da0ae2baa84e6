"""When data-parallel ranks exchange gradients: in buckets, once in a step, while the backward pass still goes on."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from every_case import by_turns, every_day
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import losses, native_t5, on_ranks, run_training

BUCKET = 3000  # elements, of the 53,000 of the tiny model: about a layer's
ENGINES = [
    ({"env_type": "pytorchDDP"}, "fp32"),
    ({"env_type": "pytorchDDP"}, "bf16"),
    ({"env_type": "deepspeed", "zero_stage": 1}, "fp32"),
    ({"env_type": "deepspeed", "zero_stage": 1}, "bf16"),
    ({"env_type": "deepspeed", "zero_stage": 2}, "fp32"),
    ({"env_type": "deepspeed", "zero_stage": 2}, "bf16"),
    ({"env_type": "deepspeed", "zero_stage": 0}, "fp32"),
]


def names(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


class Exchanges(TorchDispatchMode):
    """Gradients that are complete, and collectives, in their order; with the bytes of the collectives."""

    def __init__(self, model):
        super().__init__()
        self.events, self.elements, self.dtypes = [], 0, set()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.events.append("gradient"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            assert func._schema.name == "c10d::allreduce_"
            self.events.append("exchange")
            self.elements += sum(tensor.numel() for tensor in args[0])
            self.dtypes |= {tensor.dtype for tensor in args[0]}
        return func(*args, **(kwargs or {}))


@contextmanager
def small_buckets():
    """Buckets of about a layer, while no gradient counts as a large one, which DDP would not exchange."""
    from shardzoo.trainer.engines import buckets, ddp_engine

    assert ddp_engine.SMALLEST > 50_000
    smallest, buckets.SMALLEST = buckets.SMALLEST, BUCKET
    try:
        yield
    finally:
        buckets.SMALLEST = smallest


def exchanges(mesh, how, precision, micro_batches):
    """The events of a step's backward passes; how many elements of which types are exchanged; how many are trained."""
    from shardzoo.mpu import dropout_state
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.factory import make_engine
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.launch.ranks import Ranks

    with small_buckets():
        arguments = TrainingArguments(
            **how, precision=precision, gradient_accumulation_steps=micro_batches
        )
        model = native_t5(None).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        watch = Exchanges(model)
        engine = make_engine(model, make_optimizer(model, arguments), arguments, Ranks(mesh))
    ids = torch.arange(8).view(1, 8) + 2 + mesh.dp_rank
    dropout_state.set(0, mesh.dp_rank)

    def forward(number):
        watch.events.append("forward")
        return engine.model(input_ids=ids + number, labels=ids).loss / (2 * micro_batches)

    for _ in range(2):
        watch.events, watch.elements = [], 0
        with watch:
            engine.forward_backward(forward, micro_batches)
        engine.step()
    engine.close(whole=False)
    passes = " ".join(watch.events).split("forward")[1:]
    trained = sum(parameter.numel() for parameter in model.parameters())
    return [events.split() for events in passes], watch.elements, watch.dtypes, trained


@pytest.mark.parametrize(("how", "precision"), by_turns(ENGINES, 3), ids=names)
def test_gradients_are_exchanged_while_others_are_computed(how, precision, run_mesh):
    for passes, elements, dtypes, trained in run_mesh(1, exchanges, how, precision, 3, data=2):
        *earlier, last = passes
        if (
            how.get("zero_stage") != 2
        ):  # which keeps only a part of the sums, so all passes exchange
            assert all(set(events) == {"gradient"} for events in earlier)
            assert trained <= elements < 1.01 * trained  # once a step
        else:
            assert 3 * trained <= elements < 3.03 * trained
        ends = len(last) - 1 - last[::-1].index("gradient")
        during, after = last[:ends].count("exchange"), last[ends:].count("exchange")
        if how.get("zero_stage") == 0:
            assert (during, after > 0) == (0, True)  # DeepSpeed has no other way without ZeRO
            continue
        assert during >= 5
        assert after <= 3
        assert last.index("exchange") < last.count("gradient") / 4
        # Under ZeRO 2 in bf16, DeepSpeed exchanges each pass's gradients as they are.
        narrow = precision == "bf16" and how.get("zero_stage") == 2
        assert dtypes == {torch.bfloat16 if narrow else torch.float32}


def first_norm(mesh, folder, arguments):
    """The loss and the gradient norm of a step of one process, or of ranks with small buckets."""
    with small_buckets():
        [step], _ = run_training(
            mesh, folder, model=native_t5, global_batch_size=8, train_steps=1, **arguments
        )
    return step["loss"], step["grad_norm"]


@pytest.mark.parametrize(
    ("how", "precision"), every_day(ENGINES[1:4:2], more=[ENGINES[2], ENGINES[4]]), ids=names
)
def test_the_gradients_are_those_of_one_process(how, precision, run_mesh, tmp_path):
    """In bf16 too: they are rounded when they are computed, and added up in fp32."""
    [one] = run_mesh(
        1, first_norm, tmp_path / "one", {"env_type": "pytorch", "precision": precision}
    )
    for ranks in run_mesh(1, first_norm, tmp_path / "two", {**how, "precision": precision}, data=2):
        assert ranks == pytest.approx(one, rel=1e-6)  # the order of sums


class Experts(nn.Module):
    """Each sample uses one of two layers of one shape, in an order of its own, and a layer that only some use."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, input_ids, labels, **_):
        number = int(input_ids[0, 0])
        x = torch.ones(4, dtype=self.first.weight.dtype) * number / 10
        layers = [self.first, self.second] if number % 2 else [self.second, self.first]
        for layer in [*layers, *[self.third] * (number % 4 == 3)]:
            x = layer(x).tanh()
        return {"loss": x.pow(2).mean()}


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([1])}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_compute_gradients_in_other_orders_or_none(stage, precision, run_mesh, tmp_path):
    """Against one rank, which accumulates the same samples one after the other."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 17}}))
    how = {
        "env_type": "deepspeed",
        "zero_stage": stage,
        "precision": precision,
        "micro_batch_size": 1,
    }
    run = partial(on_ranks, run_mesh, data=Numbers(), global_batch_size=4, train_steps=3, **how)
    [(one, weights)] = run(tmp_path / "one", model=Experts())
    for steps, others in run(
        tmp_path / "two", data_ranks=2, model=Experts(), deepspeed_config=str(tmp_path / "ds.json")
    ):
        # bf16: under ZeRO 2 DeepSpeed rounds the sum over the ranks.
        close = {"rel": 1e-6} if precision == "fp32" else {"rel": 1e-2}
        assert losses(steps) == pytest.approx(losses(one), **close)
        assert [s["grad_norm"] for s in steps] == pytest.approx(
            [s["grad_norm"] for s in one], **close
        )
        if precision == "fp32":
            for name, weight in others.items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6)


# By rank. Only of 3 and 7 the third layer is used: by one rank or both, never in the last micro-batch.
NUMBERS = [[3, 0, 1], [2, 7, 4]]
EVERY_NUMBER = [3, 0, 1, 2, 7, 4]


def large_steps(model):
    """With such an epsilon, the first step grows with the gradients instead of dividing them by their size."""
    return torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)


def step_of_experts(mesh, stage):
    """The weights after one step."""
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.factory import make_engine
    from shardzoo.trainer.launch.ranks import Ranks

    numbers = NUMBERS[mesh.dp_rank] if mesh.dp_size > 1 else EVERY_NUMBER
    arguments = TrainingArguments(
        env_type="deepspeed",
        zero_stage=stage,
        gradient_accumulation_steps=len(numbers),
        clip_grad=0.0,
    )
    model = Experts()
    engine = make_engine(model, large_steps(model), arguments, Ranks(mesh))

    def forward(index):
        ids = torch.tensor([[numbers[index]]])
        return engine.model(input_ids=ids, labels=None)["loss"] / (mesh.dp_size * len(numbers))

    engine.forward_backward(forward, len(numbers))
    engine.step()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.close(whole=False)
    return weights


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_earlier_micro_batches_are_kept(stage, ranks, run_mesh):
    """A parameter that the last micro-batch does not use keeps what earlier ones have accumulated."""
    model = Experts()
    third = model.third.weight.detach().clone()
    losses = [model(torch.tensor([[n]]), None)["loss"] for n in EVERY_NUMBER]
    torch.stack(losses).mean().backward()
    large_steps(model).step()
    expected = {name: value.detach() for name, value in model.named_parameters()}
    assert float((expected["third.weight"] - third).norm()) > 1e-3
    for weights in run_mesh(1, step_of_experts, stage, data=ranks):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_second_gradient_in_one_pass_is_refused():
    from shardzoo.trainer.engines.buckets import OrderedGradients

    class Zero:
        partition_gradients = True
        process_gradients = independent_gradient_partition_epilogue = staticmethod(lambda *_: None)

    model, zero = nn.Linear(2, 2), Zero()
    zero.bit16_groups = [list(model.parameters())]
    OrderedGradients(zero, model)
    zero.process_gradients(model.bias, 0)
    with pytest.raises(
        RuntimeError, match="recompute activations with use_reentrant=False, or set overlap_comm"
    ):
        zero.process_gradients(model.bias, 0)


def test_buckets_are_sized_for_the_model():
    from shardzoo.trainer.engines.buckets import bucket_elements

    assert bucket_elements(1000, 2) == 6_553_600  # torch's 25 MiB
    assert bucket_elements(124_000_000, 8) == 15_500_000
    assert bucket_elements(7_000_000_000, 8) == 40_000_000
    assert bucket_elements(7_000_000_000, 256) == 256_000_000
