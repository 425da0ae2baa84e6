"""Chooses the task that a model learns from a file, and finds the names of a classifier's labels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from ..models import family
from .arguments import FinetuningArguments, Task
from .loading import ModelSource

PAIR_SUFFIXES = (".source", ".target")
TRANSFORMERS_TASKS: dict[str, tuple[str, ...]] = {
    "encoder-decoder": ("text2text-generation", "text-classification"),
    "decoder": ("text-generation", "text2text-generation", "text-classification"),
    "encoder": ("text-classification",),
}


def choose_task(arguments: FinetuningArguments, source: ModelSource) -> Task:
    """Returns the task given by the arguments, or implied by model and file. ValueError if the model does not fit."""
    fitting = tuple(family(source.model_type).tasks) if source.native else TRANSFORMERS_TASKS[source.shape]
    if arguments.task is None:
        if source.shape != "decoder" or arguments.train_file is None:
            return cast(Task, fitting[0])
        return "text2text-generation" if holds_pairs(Path(arguments.train_file), arguments) else "text-generation"
    if arguments.task not in fitting:
        hint = "" if source.native is False or arguments.task != "text-classification" else "; native=False does"
        raise ValueError(
            f"{source.folder} is a {source.shape} ({source.model_type}), which does not learn {arguments.task}; it "
            f"learns {' or '.join(fitting)}{hint}"
        )
    return arguments.task


def holds_pairs(path: Path, arguments: FinetuningArguments) -> bool:
    """Returns whether a file holds sources with targets rather than plain text (JSON lines with the key `text`)."""
    if path.suffix in PAIR_SUFFIXES or Path(f"{path}.source").exists():
        return True
    if path.suffix == ".parquet" or (path.is_dir() and (path / "dataset_info.json").exists()):
        from datasets import Dataset, load_from_disk

        data = load_from_disk(str(path)) if path.is_dir() else Dataset.from_parquet(str(path))
        return "text" not in getattr(data, "column_names", ())
    if path.is_dir() or path.suffix not in (".json", ".jsonl"):
        return False
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    try:
        record = json.loads(first)
    except ValueError:
        return True  # the reader of pairs reports the error
    has_ids = isinstance(record, dict) and {arguments.source_id, arguments.target_id} <= record.keys()
    return has_ids or not (isinstance(record, dict) and "text" in record)


def label_names(labels: Iterable[str]) -> list[str]:
    """Returns the distinct labels in the order of their classes: numbers by value, names alphabetically."""
    distinct = set(labels)
    numbers = all(label.isdecimal() for label in distinct)
    return sorted(distinct, key=int) if numbers else sorted(distinct)


def stored_labels(source: ModelSource) -> list[str] | None:
    """Returns the labels of a stored classifier by class; None if the model has no classifier."""
    names = source.values.get("id2label")
    architecture = str((source.values.get("architectures") or [""])[0])
    if not architecture.endswith("ForSequenceClassification"):
        return None
    if not isinstance(names, dict):
        return ["LABEL_0", "LABEL_1"]  # transformers' default
    return [str(names[number]) for number in sorted(names, key=int)]


class Labels:
    """A classifier's labels; `names` are in the order of the classes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._classes = {name: number for number, name in enumerate(self.names)}
        if self.names == [
            f"LABEL_{number}" for number in range(len(self.names))
        ]:  # the default names of a model without label names
            self._classes |= {str(number): number for number in range(len(self.names))}

    def covers(self, labels: Iterable[str]) -> bool:
        return all(label in self._classes for label in labels)

    def class_of(self, label: str) -> int:
        if label not in self._classes:
            few = ", ".join(self.names[:10]) + (", …" if len(self.names) > 10 else "")
            raise ValueError(f"the label {label!r} is not one of the model's: {few}")
        return self._classes[label]
