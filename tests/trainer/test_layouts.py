"""Training is the same under every layout, and goes on as if it had never stopped."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from every_case import EVERY_CASE, every_day

from shardzoo.convert.operations import split
from shardzoo.mpu import Shard
from shardzoo.mpu.mesh import axis_ranks, axis_sizes
from shardzoo.trainer.checkpointing.model_files import StoredOptimizer

# Losses in fp32 differ by the order of sums alone.
SAME_LOSS = {"rel": 1e-5, "abs": 0}
STEPS, SAVED = (20, 8) if EVERY_CASE else (10, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


TINY = {"vocab_size": 97, "n_positions": 24, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0}
TWELVE_HEADS = {"model_type": "gpt2", "n_embd": 48, "n_head": 12, **TINY}
# GPT-2 XL's heads, and an inner width of 4H + 1.
TWENTY_FIVE_HEADS = {"model_type": "gpt2", "n_embd": 50, "n_head": 25, "n_inner": 201, **TINY}
EIGHT_ON_TWO_HEADS = {
    "model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 51, "vocab_size": 97, "max_position_embeddings": 24,
    "attention_dropout": 0.1,
}  # fmt: skip
CONFIGS = {"gpt2": TWENTY_FIVE_HEADS, "qwen2": EIGHT_ON_TWO_HEADS}


def losses_of_training(mesh, folder: Path, config: dict | None = None, **changes) -> list[float]:
    """Trains a small model, by default GPT-2, with everything on (dropout, clipping, an odd vocabulary)."""
    from shardzoo.models import ParallelConfig, from_config
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
    model = from_config(
        config or TWELVE_HEADS,
        mesh,
        dtype=DTYPES[arguments.precision],
        parallel_config=parallel_config,
    )
    reporter = Losses()
    Trainer(arguments, mesh=mesh).train(model, train_dataset=Samples(), reporter=reporter)
    return reporter.values


@pytest.fixture
def train(run_mesh, tmp_path):
    """`train(tp, data=1, folder="run", **arguments)`: the losses, the same on every rank."""

    def run(
        tp: int,
        *,
        data: int = 1,
        folder: str = "run",
        start: str = "run",
        first_step: int = 0,
        **changes,
    ) -> list[float]:
        if first_step:
            changes |= {
                "load_dir": str(tmp_path / start / "checkpoints" / f"step-{first_step:06d}")
            }
            folder = "resumed" if folder == "run" else folder
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
    assert train(2, sequence_parallel=True, recompute="full") == pytest.approx(
        unsplit_losses, **SAME_LOSS
    )


@pytest.mark.parametrize(
    ("tp", "data", "zero_stage"), every_day([(2, 2, 2)], more=[(2, 1, 0), (2, 1, 1), (2, 1, 2)])
)
def test_splitting_changes_nothing_and_resuming_is_bit_for_bit(
    train, unsplit_losses, tp, data, zero_stage
):
    whole = train(tp, data=data, zero_stage=zero_stage, save_interval=SAVED)
    assert whole == pytest.approx(unsplit_losses, **SAME_LOSS)
    assert train(tp, data=data, zero_stage=zero_stage, first_step=SAVED) == whole[SAVED:]


def test_four_ranks_change_nothing_and_another_layout_goes_on(train, unsplit_losses):
    assert train(4, save_interval=SAVED) == pytest.approx(unsplit_losses, **SAME_LOSS)
    assert train(2, data=2, first_step=SAVED) == pytest.approx(unsplit_losses[SAVED:], **SAME_LOSS)


def test_bf16_with_master_weights_resumes_bit_for_bit(train, unsplit_losses):
    whole = train(2, precision="bf16", save_interval=SAVED)
    assert whole == pytest.approx(unsplit_losses, rel=2e-2)
    assert train(2, precision="bf16", first_step=SAVED) == whole[SAVED:]


def checkpointed(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, the optimizer's included, put together as the manifest says."""
    from safetensors.torch import load_file

    shards = {
        name: record["shard"]
        for name, record in json.loads((folder / "manifest.json").read_text())["tensors"].items()
    }
    tensors = {}
    for stem in ("rank", "optimizer"):
        ranks = [load_file(path) for path in sorted(folder.glob(f"{stem}_*.safetensors"))]
        for name in ranks[0] if ranks else ():
            shard = shards[name.rpartition("/")[2]]
            parts = [rank[name] for rank in ranks]
            is_split = shard is not None and parts[0].dim() > 0
            tensors[name] = Shard.from_record(shard).merge(parts) if is_split else parts[0]
    return tensors


@pytest.mark.before_release
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_heads_that_do_not_divide_change_nothing(name, train, run_mesh, tmp_path):
    """Losses with weight decay at 2, 3 and 4 ranks, and which tensors are saved."""
    config = CONFIGS[name]
    settings = {"config": config, "weight_decay": 0.1, "save_interval": SAVED}
    unsplit = train(1, folder="unsplit", **settings)
    for tp, zero_stage in ((2, 2), (3, 1), (4, 0)):
        whole = train(tp, folder=f"tp{tp}", zero_stage=zero_stage, **settings)
        assert whole == pytest.approx(unsplit, **SAME_LOSS)
    assert (
        train(4, folder="same", start="tp4", first_step=SAVED, zero_stage=0, **settings)
        == whole[SAVED:]
    )
    assert train(2, folder="other", start="tp4", first_step=SAVED, **settings) == pytest.approx(
        unsplit[SAVED:], **SAME_LOSS
    )
    final, reference = (
        checkpointed(tmp_path / run / "checkpoints" / f"step-{STEPS:06d}")
        for run in ("tp4", "unsplit")
    )
    assert all(value.shape == final[tensor].shape for tensor, value in reference.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_resharding_keeps_every_bit(name, train, tmp_path):
    """Four ranks' weights and optimizer states, read for 1, 2 and 3 ranks; the weights also by way of files."""
    from shardzoo.models.auto import as_config, build_on_meta

    train(4, config=CONFIGS[name], train_steps=2, save_interval=2)
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    expected, model = checkpointed(saved), build_on_meta(as_config(CONFIGS[name]), None)
    for size in (1, 2, 3):
        sizes = {**axis_sizes(None), "tensor": size}
        ranks = []
        for rank in range(size):
            mesh = SimpleNamespace(ranks={**axis_ranks(None), "tensor": rank}, sizes=sizes)
            place = SimpleNamespace(tp_rank=rank, tp_size=size, pp_size=1, mesh=mesh)
            ranks.append(dict(StoredOptimizer(saved, model, place)))
        for tensor, value in ranks[0].items():
            shard = getattr(model.get_parameter(tensor.partition("/")[2]), "shard", None)
            merged = (
                value
                if shard is None or not value.dim()
                else shard.merge([rank[tensor] for rank in ranks])
            )
            assert torch.equal(merged, expected[tensor]), tensor
    split(saved, tmp_path / "one", 1)
    split(tmp_path / "one", tmp_path / "two", 2)
    for tensor, value in checkpointed(tmp_path / "two").items():
        assert torch.equal(value, expected[tensor]), tensor
