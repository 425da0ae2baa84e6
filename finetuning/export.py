"""Writes a fine-tuned model as a folder that transformers and the zoo read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..convert.operations import Options, merge
from ..trainer.checkpointing.model_files import model_files
from ..trainer.checkpointing.snapshot import Snapshot, TrainerState, write_snapshot
from ..trainer.engines.state import model_tensors
from ..trainer.launch.ranks import Ranks, on_first_rank
from .loading import Source


def save_whole(model: Any, source: Source, companions: Path, folder: Path, ranks: Ranks) -> None:
    """A Hugging Face folder of the whole model, or of its LoRA weights. Collective.

    companions: a folder whose files, such as the tokenizer's, are put beside the weights. ValueError if `folder` holds
    something else than a model that was saved there before.
    """
    on_first_rank(lambda: check_destination(folder))
    if not source.native:
        on_first_rank(lambda: _save_transformers(model, companions, folder))
        return
    shards = folder.with_name(f".{folder.name}.shards")
    files = model_files(model)
    mine = {files.weights_file(ranks): model_tensors(model)} if ranks.dp_rank == 0 else {}
    weights = files.weights_file(ranks) if ranks.dp_rank == 0 else None
    state = TrainerState(step=0, consumed_samples=0)
    write_snapshot(Snapshot(state, mine, weights, files, companions), shards, ranks, None)

    def merge_shards() -> None:
        merge(shards, folder, Options(overwrite=True))
        shutil.rmtree(shards)

    on_first_rank(merge_shards)


def check_destination(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder to save the model in")
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    ):
        raise ValueError(f"{folder} holds files that are no model's; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)


def _save_transformers(model: Any, companions: Path, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in companions.iterdir():
        if file.is_file() and not (partial / file.name).exists():
            shutil.copy2(file, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
