"""Training checkpoints: a folder of shards that the converter reads, the optimizer's tensors, and the progress."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from ..convert.manifest import Manifest, TensorRecord
from ..convert.sharded import ShardedReader, write_rank_file
from ..models.common.config import ModelConfig
from ..mpu import ParallelMesh
from .coordination import on_first_rank
from .deepspeed_engine import DeepSpeedEngine

WEIGHTS = "rank"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class TrainerState:
    """step: optimizer steps done. consumed_samples: sequences trained on, over all ranks."""

    step: int
    consumed_samples: int


def save_checkpoint(
    folder: Path,
    engine: DeepSpeedEngine,
    config: ModelConfig,
    mesh: ParallelMesh,
    state: TrainerState,
    tokenizer: Path | None,
) -> None:
    """Writes a checkpoint beside `folder` and renames it when it is complete. Collective over all ranks."""
    partial = folder.with_name(f".{folder.name}.partial")
    on_first_rank(lambda: _make_empty(partial))
    optimizer_tensors = engine.optimizer_tensors()
    hashes: dict[str, str] = {}
    if mesh.dp_rank == 0:
        parameters = dict(engine.module.named_parameters())
        hashes = write_rank_file(partial, WEIGHTS, mesh.tp_rank, parameters)
        write_rank_file(partial, OPTIMIZER, mesh.tp_rank, optimizer_tensors)
    hashes_by_rank: list[dict[str, str]] = [{}] * mesh.tp_size
    dist.all_gather_object(hashes_by_rank, hashes, group=mesh.tp_group)
    dist.barrier()
    on_first_rank(lambda: _complete(partial, folder, engine, config, hashes_by_rank, state, tokenizer))


def load_checkpoint(folder: Path, engine: DeepSpeedEngine, mesh: ParallelMesh) -> TrainerState:
    """Restores the optimizer and returns the progress; the weights are read by `load_weights` before."""
    state = TrainerState(**json.loads((folder / "trainer_state.json").read_text()))
    parameters = dict(engine.module.named_parameters())
    size = Manifest.read(folder).tensor_parallel_size
    by_tensor = {}
    for name in ShardedReader(folder, OPTIMIZER, size, {}).names():
        by_tensor[name] = getattr(parameters[name.split("/", 1)[1]], "shard", None)
    reader = ShardedReader(folder, OPTIMIZER, size, by_tensor)
    tensors = {name: reader.local(name, mesh.tp_rank, mesh.tp_size) for name in by_tensor}
    engine.load_optimizer_tensors(tensors, state.step)
    return state


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(
    partial: Path,
    folder: Path,
    engine: DeepSpeedEngine,
    config: ModelConfig,
    hashes_by_rank: list[dict[str, str]],
    state: TrainerState,
    tokenizer: Path | None,
) -> None:
    config.save(partial)
    (partial / "trainer_state.json").write_text(json.dumps(asdict(state), indent=1) + "\n")
    if tokenizer is not None:
        for file in tokenizer.iterdir():
            shutil.copy2(file, partial)
    manifest(engine, config, hashes_by_rank).write(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def manifest(engine: DeepSpeedEngine, config: ModelConfig, hashes_by_rank: list[dict[str, str]]) -> Manifest:
    """The manifest of this run's shards, whose tensors' hashes came from each tensor-parallel rank."""
    records = {}
    padded_vocab_size = config.vocab_size
    for name, parameter in engine.module.named_parameters():
        shard = getattr(parameter, "shard", None)
        if shard is not None and shard.pad_multiple and shard.shape[shard.dim] == config.vocab_size:
            padded_vocab_size = len(hashes_by_rank) * shard.local_shape(len(hashes_by_rank))[shard.dim]
        records[name] = TensorRecord(
            shape=tuple(shard.shape if shard else parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            shard=asdict(shard) if shard else None,
            sha256=tuple(hashes[name] for hashes in hashes_by_rank),
        )
    return Manifest(
        model_type=config.model_type,
        tensor_parallel_size=len(hashes_by_rank),
        vocab_size=config.vocab_size,
        padded_vocab_size=padded_vocab_size,
        tensors=records,
    )
