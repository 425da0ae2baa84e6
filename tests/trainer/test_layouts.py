"""Training is the same under every layout, and goes on as if it had never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

# Losses in fp32 differ by the order of sums alone.
SAME_LOSS = {"rel": 1e-5, "abs": 0}
STEPS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def losses_of_training(mesh, folder: Path, **changes) -> list[float]:
    """Trains a small GPT-2 with everything on (dropout, clipping, a vocabulary that does not divide)."""
    from shardzoo.models import ParallelConfig, find_config, from_config
    from shardzoo.trainer import Trainer, TrainingArguments
    from shardzoo.trainer.logging.reporter import SilentReporter

    class Samples:
        """Endless: sample i is a function of i alone."""

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            start, stride = torch.randint(1, 97, (2,), generator=generator)
            tokens = (start + stride * torch.arange(24)) % 13
            labels = tokens.clone()
            labels[: index % 7] = -100  # unequal numbers of targets in micro-batches
            return {"input_ids": tokens, "labels": labels}

    class Losses(SilentReporter):
        def __init__(self) -> None:
            self.values: list[float] = []

        def training(self, step: int, values: dict[str, float]) -> None:
            self.values.append(values["loss"])

    config = find_config("gpt2").with_changes(
        vocab_size=97, n_positions=24, n_embd=48, n_layer=2, n_head=12, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        **{
            "env_type": "deepspeed+mpu",
            "train_steps": STEPS,
            "lr": 5e-3,
            "warmup_steps": 4,
            "beta2": 0.95,
            "micro_batch_size": 4 // mesh.dp_size,  # two of them are accumulated
            "global_batch_size": 8,
            "clip_grad": 0.5,
            "log_interval": 1,
            "save_dir": str(folder),
        }
        | changes,
        model_parallel_size=mesh.tp_size,
    )
    parallel_config = ParallelConfig(arguments.sequence_parallel, arguments.recompute)
    model = from_config(config, mesh, dtype=DTYPES[arguments.precision], parallel_config=parallel_config)
    reporter = Losses()
    Trainer(arguments, mesh=mesh).train(model, train_dataset=Samples(), reporter=reporter)
    return reporter.values


@pytest.fixture
def train(run_mesh, tmp_path):
    """`train(tp, data=1, folder="run", **arguments)`: the losses, the same on every rank."""

    def run(tp: int, *, data: int = 1, folder: str = "run", first_step: int = 0, **changes) -> list[float]:
        if first_step:
            changes |= {"load_dir": str(tmp_path / "run" / "checkpoints" / f"step-{first_step:06d}")}
            folder = "resumed"
        training = partial(losses_of_training, folder=tmp_path / folder, **changes)
        by_rank = run_mesh(tp, training, data=data)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return run


@pytest.fixture(scope="module")
def unsplit_losses(run_mesh, tmp_path_factory):
    return run_mesh(1, losses_of_training, tmp_path_factory.mktemp("unsplit"))[0]


def test_loss_falls(unsplit_losses):
    assert len(unsplit_losses) == STEPS
    assert unsplit_losses[-1] < unsplit_losses[0] - 1


def test_two_data_parallel_ranks_change_nothing(train, unsplit_losses):
    assert train(1, data=2) == pytest.approx(unsplit_losses, **SAME_LOSS)


def test_sequence_parallelism_and_recomputation_change_nothing(train, unsplit_losses):
    assert train(2, sequence_parallel=True, recompute="full") == pytest.approx(unsplit_losses, **SAME_LOSS)


@pytest.mark.parametrize(("tp", "data", "zero_stage"), [(2, 1, 0), (2, 1, 1), (2, 1, 2), (2, 2, 2)])
def test_splitting_changes_nothing_and_resuming_is_bit_for_bit(train, unsplit_losses, tp, data, zero_stage):
    whole = train(tp, data=data, zero_stage=zero_stage, save_interval=8)
    assert whole == pytest.approx(unsplit_losses, **SAME_LOSS)
    assert train(tp, data=data, zero_stage=zero_stage, first_step=8) == whole[8:]


def test_four_ranks_change_nothing_and_another_layout_goes_on(train, unsplit_losses):
    assert train(4, save_interval=8) == pytest.approx(unsplit_losses, **SAME_LOSS)
    assert train(2, data=2, first_step=8) == pytest.approx(unsplit_losses[8:], **SAME_LOSS)


def test_bf16_with_master_weights_resumes_bit_for_bit(train, unsplit_losses):
    whole = train(2, precision="bf16", save_interval=8)
    assert whole == pytest.approx(unsplit_losses, rel=2e-2)
    assert train(2, precision="bf16", first_step=8) == whole[8:]
