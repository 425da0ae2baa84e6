"""Reads the files that each checkpoint holds besides the model's and the trainer's own: those of
its tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...checkpoint.folder_files import CONFIG, GENERATION_CONFIG, holds_weights
from ...checkpoint.manifest import checked_tokenizer
from ...data.tokenizers.files import TOKENIZER_FILES, check_tokenizer_folder
from ...data.tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from ...data.tokenizers.vocabulary import Vocabulary
from ...files.safe_paths import checked_file
from ...files.working_copies import name_urls
from ...models.config import ModelConfig
from ..launch.ranks import on_first_rank

# Bytes of all files: they are in memory while training runs, and are written into each checkpoint.
LARGEST_TOTAL = 256 << 20


@dataclass(frozen=True)
class ExtraFiles:
    """Files for a checkpoint by name, and the vocabulary of the tokenizer among them. Only the
    first rank has them.

    They are read before training, so that a folder that changes or disappears later does not end
    the run.
    """

    contents: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    vocabulary: Vocabulary | None = None


def read_extra_files(
    given: str | Path | None, model: Any, notify: Callable[[str], None]
) -> ExtraFiles:
    """Returns the files of the folder `given`.

    Raises ValueError on every rank if it is unusable. Collective.
    """

    def read(folder: str | Path) -> ExtraFiles:
        own: set[str] = set()
        # The checkpoint of a model of transformers has its settings of generation; see `WholeFiles`.
        is_zoo_model = isinstance(getattr(model, "config", None), ModelConfig)
        settings = getattr(model, "generation_config", None)
        if not is_zoo_model and hasattr(settings, "to_json_string"):
            own.add(GENERATION_CONFIG)
        contents = read_folder(folder, own)
        if contents.keys().isdisjoint(TOKENIZER_FILES):
            return ExtraFiles(contents)
        return ExtraFiles(contents, _read_vocabulary(Path(folder), notify))

    if given is None:
        return ExtraFiles()
    return _run_on_first_rank(lambda: read(given))


def with_tokenizer(
    files: ExtraFiles,
    model: Any,
    loaded_from: Path | None,
    dataset: Any,
    notify: Callable[[str], None],
) -> ExtraFiles:
    """Returns the files, and those of a tokenizer unless they have one. Collective.

    The tokenizer is that of the dataset (see `shardzoo.data.build_loader`), if it carries one; else
    of the checkpoint that the weights were `loaded_from`, or of the folder that the model was.
    `notify` is called with a message if there is no tokenizer.
    """

    def add() -> ExtraFiles:
        if not files.contents.keys().isdisjoint(TOKENIZER_FILES):
            return files
        folders: list[Path] = []
        if loaded_from is not None:
            folders.append(loaded_from)
        named = getattr(model, "name_or_path", None)
        if named:
            folders.append(Path(named))
        tokenizer = _choose_tokenizer(getattr(dataset, "tokenizer", None), folders, notify)
        return ExtraFiles({**tokenizer.contents, **files.contents}, tokenizer.vocabulary)

    return _run_on_first_rank(add)


def _run_on_first_rank(work: Callable[[], ExtraFiles]) -> ExtraFiles:
    """Runs `work` on the first rank, which alone gets the files.

    Raises its ValueError on every rank.
    """
    found = ExtraFiles()

    def keep() -> None:
        nonlocal found
        found = work()

    on_first_rank(keep)
    return found


def read_folder(folder: str | Path, own: set[str]) -> dict[str, bytes]:
    """Returns the contents of a folder's files by name; inner folders are left out.

    `own` are names of files that the checkpoint has itself, besides the usual ones.

    Raises ValueError if the folder cannot be read, holds something other than regular files, is
    larger than 256 MiB, or if one of its files would replace a file of the checkpoint.
    """
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise ValueError(f"extra_files must be the path of a folder, not {folder!r}")
    path = Path(folder)
    try:
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            raise ValueError(
                f"extra_files: {path} {problem}; name a folder of small files, such as a tokenizer's"
            )
        files = [
            checked_file(path, entry.name) for entry in sorted(path.iterdir()) if not entry.is_dir()
        ]
        for file in files:
            if holds_weights(file.name) or file.name in {CONFIG, *own}:
                raise ValueError(
                    f"extra_files: {file} would replace a file of the checkpoint; put the "
                    "tokenizer's files into a folder of their own, or leave extra_files out if "
                    "the model was loaded from this folder"
                )
        total = sum(file.stat().st_size for file in files)
        if total > LARGEST_TOTAL:
            raise ValueError(
                f"extra_files: the files of {path} have {total:,} bytes, and each checkpoint would hold a copy; they "
                f"may have at most {LARGEST_TOTAL:,}"
            )
        return {file.name: file.read_bytes() for file in files}
    except OSError as error:
        raise ValueError(
            f"extra_files: cannot read {error.filename or path}: {error.strerror}"
        ) from None


def _choose_tokenizer(
    carried: Any, folders: Sequence[Path], notify: Callable[[str], None]
) -> ExtraFiles:
    """Returns the tokenizer that the data carries, or the first one in `folders`."""
    reasons: list[str] = []
    if not folders:
        reasons.append("the model was not loaded from a folder")
    stored = ExtraFiles()
    for folder in folders:
        try:
            stored = _read_tokenizer(folder)
            break
        except (ValueError, OSError) as error:
            reasons.append(str(error))
    if isinstance(carried, Tokenizer):
        vocabulary = Vocabulary.from_tokenizer(carried)
        if vocabulary == stored.vocabulary:
            return stored  # the same tokenizer with its original files
        if stored.vocabulary is not None and not stored.vocabulary.begins(carried):
            notify(
                "the data has another tokenizer than the folder of the model; the checkpoints will hold the data's"
            )
        with TemporaryDirectory() as folder:
            save_tokenizer(carried, folder)
            return _read_tokenizer(Path(folder))
    if not stored.contents:
        reason = name_urls("; ".join(reasons))
        notify(
            f"the checkpoints will hold no tokenizer ({reason}); pass its folder as extra_files to train()"
        )
    return stored


def _read_tokenizer(folder: Path) -> ExtraFiles:
    """Returns a folder's tokenizer files alone.

    ValueError if there is no readable one of a recorded vocabulary.
    """
    vocabulary = Vocabulary.from_tokenizer(checked_tokenizer(folder, folder))
    present = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    return ExtraFiles(
        {name: checked_file(folder, name).read_bytes() for name in present}, vocabulary
    )


def _read_vocabulary(folder: Path, notify: Callable[[str], None]) -> Vocabulary | None:
    """Returns the vocabulary of a folder that was given;

    None for a tokenizer that only its own code reads.
    """
    check_tokenizer_folder(folder)
    try:
        return Vocabulary.from_tokenizer(load_tokenizer(folder))
    except ValueError as error:
        notify(f"the checkpoints will not record the vocabulary of extra_files: {error}")
        return None
