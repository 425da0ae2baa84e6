"""Updates in the backward pass are those after it, to the bit, and no two gradients exist at a time."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from every_case import every_day
from training import losses, native_t5, on_ranks, run_training

from shardzoo.trainer import TrainingArguments

SETTINGS = {
    "train_steps": 4, "lr": 5e-3, "warmup_steps": 1, "clip_grad": 0.0, "micro_batch_size": 4, "save_interval": 2,
    "model": native_t5,
}  # fmt: skip
# Tensor-parallel ranks, data-parallel ranks, arguments.
LAYOUTS = {
    "AdamW": (1, 1, {}),
    "bf16": (1, 1, {"precision": "bf16"}),
    "Adafactor": (1, 1, {"optimizer": "adafactor", "lr": 1e-3}),
    "Adafactor in bf16": (1, 1, {"optimizer": "adafactor", "lr": 1e-3, "precision": "bf16"}),
    "8-bit AdamW": (1, 1, {"optimizer": "adamw8bit"}),
    "LoRA": (1, 1, {"lora_rank": 2}),
    "recomputed": (1, 1, {"recompute": "full"}),
    "fsdp": (1, 2, {"env_type": "fsdp"}),
    "fsdp, two tensor ranks": (2, 2, {"env_type": "fsdp", "micro_batch_size": 2}),
    "fsdp, three tensor ranks": (3, 1, {"env_type": "fsdp"}),
    "fsdp, split sequences": (2, 1, {"env_type": "fsdp", "sequence_parallel": True, "recompute": "selective"}),
    "fsdp, three ranks, bf16": (1, 3, {"env_type": "fsdp", "precision": "bf16"}),
    "fsdp, replicas": (1, 4, {"env_type": "fsdp", "micro_batch_size": 1, "fsdp_replicas": 2}),
    "fsdp, offloaded": (1, 2, {"env_type": "fsdp", "offload_optimizer": True}),
    "fsdp, whole blocks": (1, 2, {"env_type": "fsdp", "fsdp_reshard_after_forward": False}),
    "fsdp, Adafactor": (2, 2, {"env_type": "fsdp", "optimizer": "adafactor", "lr": 1e-3, "micro_batch_size": 2}),
}  # fmt: skip
DAILY = ["AdamW", "bf16", "fsdp, three tensor ranks"]


def train(run_mesh, folder, tp, ranks, **arguments):
    """What each rank reports of each step, and its weights at the end."""
    if tp > 1:
        arguments["model_parallel_size"] = tp
    return on_ranks(run_mesh, folder, tp=tp, data_ranks=ranks, **SETTINGS | arguments)


@pytest.mark.parametrize(
    "name", every_day(DAILY, more=[name for name in LAYOUTS if name not in DAILY])
)
def test_an_update_is_that_of_the_whole_step(run_mesh, tmp_path, name):
    tp, ranks, arguments = LAYOUTS[name]
    run = partial(train, run_mesh, tp=tp, ranks=ranks, **arguments)
    expected = run(tmp_path / "after")
    within = run(tmp_path / "within", optimizer_in_backward=True)
    saved = str(tmp_path / "after" / "checkpoints" / "step-000002")
    resumed = run(tmp_path / "resumed", optimizer_in_backward=True, load_dir=saved)
    for (steps, weights), (same, again), (rest, last) in zip(
        expected, within, resumed, strict=True
    ):
        assert losses(same) == losses(steps)
        assert losses(rest) == losses(steps)[2:]
        # It is put together from the norms of the parameters, in 32 bits.
        norms = [step["grad_norm"] for step in steps]
        assert [step["grad_norm"] for step in same] == pytest.approx(norms, rel=1e-5)
        for key, value in weights.items():
            assert value.equal(again[key]), key
            assert value.equal(last[key]), key


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_gradient_exists_at_a_time(tmp_path, precision):
    from shardzoo.trainer.engines.backward_updates import BackwardUpdates

    model = native_t5(None)
    counts = []
    update = BackwardUpdates.update

    def note(updates, updated):
        everything = {*model.parameters(), *updates._group_of}
        counts.append(sum(each.grad is not None for each in everything))
        update(updates, updated)
        assert updated.grad is None

    with mock.patch.object(BackwardUpdates, "update", note):
        settings = SETTINGS | {"model": model, "precision": precision, "train_steps": 1}
        run_training(None, tmp_path, optimizer_in_backward=True, **settings)
    assert counts == [1] * len(list(model.parameters()))


DEEP = {
    "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 6, "vocab_size": 97, "n_positions": 16,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def measure_peak(precision, **arguments):
    """The bytes that a step takes at most, on top of the parameters and the optimizer's states."""
    from memory import peak_of

    from shardzoo.models import from_config
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.engines.precision import prepare_model
    from shardzoo.trainer.engines.torch_engine import TorchEngine
    from shardzoo.trainer.launch.ranks import Ranks

    chosen = TrainingArguments(train_steps=1, clip_grad=0.0, precision=precision, **arguments)
    model = from_config(DEEP, None).train()
    prepare_model(model, torch.device("cpu"), chosen, Ranks(None))
    engine = TorchEngine(model, make_optimizer(model, chosen), chosen)
    ids = torch.arange(3, 11).view(1, -1)

    def step() -> None:
        engine.forward_backward(lambda _: engine.model(input_ids=ids, labels=ids).loss, 1)
        engine.step()

    step()
    return peak_of(step)


@pytest.mark.parametrize("precision", every_day(["bf16"], more=["fp32"]))
def test_a_step_needs_the_memory_of_one_gradient(precision):
    from shardzoo.models import config_from_dict
    from shardzoo.trainer.estimate import Job, estimate

    job = Job(length=8, padded=False, precision=precision, device="cpu", optimizer_in_backward=True)
    found = estimate(config_from_dict(DEEP), job)
    kept = {
        "parameters",
        "fp32 master weights",
        "optimizer state",
        "framework",
        "copy for checkpoints",
    }
    expected = 0
    for moment in found.moments:
        passing = sum(count for name, count in moment.lines.items() if name not in kept)
        expected = max(expected, passing)
    gradients = 4 * found.parameters
    assert measure_peak(precision) > gradients
    needed = measure_peak(precision, optimizer_in_backward=True)
    assert needed < gradients / 4
    assert needed == pytest.approx(expected, rel=0.1)


def test_a_parameter_whose_gradient_is_not_finite_stays():
    from shardzoo.trainer.engines.backward_updates import BackwardUpdates

    for kind in (torch.optim.AdamW, torch.optim.SGD):
        good, bad = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = kind(
            [good, bad], lr=0.1, **({"fused": True} if kind is torch.optim.AdamW else {})
        )
        updates = BackwardUpdates(optimizer)
        good.grad = torch.ones(3)
        bad.grad = torch.tensor([1.0, float("nan"), 1.0])
        for parameter in (bad, good):
            updates.update(parameter)
        assert bad.equal(torch.ones(3))
        assert (good < 1).all()
        assert bad.grad is None
        assert updates.take_norm([good, bad], None, None).isnan()
        assert updates.take_norm([good, bad], None, None) == 0


REFUSED = [
    ({}, "clip_grad=1.0"),
    ({"clip_grad": 0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    ({"clip_grad": 0, "env_type": "pytorchDDP"}, "env_type='pytorchDDP'"),
    ({"clip_grad": 0, "env_type": "deepspeed"}, "env_type='deepspeed'"),
    ({"clip_grad": 0, "precision": "fp16"}, "precision='fp16'"),
    ({"clip_grad": 0, "optimizer": "lion"}, "optimizer='lion'"),
    ({"clip_grad": 0, "optimizer": "muon", "env_type": "fsdp"}, "optimizer='muon'"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_what_needs_all_gradients_is_refused(arguments, named):
    with pytest.raises(ValueError, match=f"optimizer_in_backward=True does not work with {named}"):
        TrainingArguments(optimizer_in_backward=True, **arguments)


def test_what_a_run_finds_out_is_refused(tmp_path):
    settings = SETTINGS | {"model": native_t5(None), "optimizer_in_backward": True}
    with pytest.raises(ValueError, match="global_batch_size=8 makes 2 micro-batches"):
        run_training(None, tmp_path / "batches", **settings, global_batch_size=8)
    own = torch.optim.SGD
    model = native_t5(None)
    lion = pytest.importorskip("pytorch_optimizer").Lion(model.parameters())
    with pytest.raises(ValueError, match="updates one parameter at a time, and Lion may need all"):
        run_training(None, tmp_path / "lion", **settings | {"model": model}, updates=(lion, None))
    model = native_t5(None)
    updates = (own(model.parameters(), lr=0.1, momentum=0.9), None)
    steps, _ = run_training(None, tmp_path / "own", **settings | {"model": model}, updates=updates)
    assert losses(steps)[-1] < losses(steps)[0]
