"""The folder of a fine-tuning run, and what lies beside a model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ..trainer.checkpointing.snapshot import STATE
from ..trainer.run_folder import RunFolder, make_run_folder
from .arguments import TrainerArguments
from .loading import Source

# What describes one invocation, and not the run.
INVOCATION = ("resume", "overwrite", "config", "local_rank", "dry_run")


def check_run(arguments: TrainerArguments) -> None:
    """ValueError if output_dir cannot be this run's, or if load_dir has nothing to begin with. Changes nothing."""
    if arguments.output_dir:
        folder = RunFolder(Path(arguments.output_dir))
        folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite)
    if arguments.load_dir is not None:
        path = Path(arguments.load_dir)
        if not RunFolder(path).steps() and not (path / STATE).exists():
            raise ValueError(f"load_dir {path} holds no checkpoint")


def open_run(arguments: TrainerArguments, write_companions: Callable[[Path], None]) -> RunFolder:
    """The folder that the arguments name, or a new one, ready for the trainer; for the first rank. ValueError as for
    `check_run`."""
    check_run(arguments)
    if not arguments.output_dir:
        folder = RunFolder(make_run_folder(arguments.model_name_or_path))
    else:
        folder = RunFolder(Path(arguments.output_dir))
        if arguments.overwrite:
            shutil.rmtree(folder.path, ignore_errors=True)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output_dir {folder.path} cannot be made ({error.strerror}); choose another") from None
    kept = {name: value for name, value in asdict(arguments).items() if name not in INVOCATION}
    folder.arguments_file.write_text(yaml.safe_dump(kept, sort_keys=False))
    write_companions(tokenizer_folder(folder))
    return folder


def tokenizer_folder(run: RunFolder) -> Path:
    return run.path / "tokenizer"


def write_companions(tokenizer: Any, source: Source, folder: Path) -> None:
    """The tokenizer, and the settings of generation that belong to the weights."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    stored = source.folder / "generation_config.json"
    if source.native and stored.exists():
        shutil.copy2(stored, folder)
