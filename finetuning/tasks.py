"""Chooses the task that a model learns from a file, and the labels of a classifier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..data.text.lines import iter_json_records, parse_json_text
from ..files.working_copies import find_source
from ..models import family
from .arguments import WITH_LABELS, FinetuningArguments, ProblemType, Task
from .loading import ModelSource

PAIR_SUFFIXES = (".source", ".target")
WORD_SUFFIXES = (".conll", ".bio", ".iob")
# The models of these tasks generate nothing.
WITHOUT_TEXTS = (*WITH_LABELS, "question-answering", "multiple-choice", "embedding", "reranking")
# These tasks compare answers to a prompt.
WITH_ANSWERS = ("preference", "reward")
_OF_ANY = ("text-classification", "token-classification", "question-answering")
TRANSFORMERS_TASKS: dict[str, tuple[str, ...]] = {
    "encoder-decoder": ("text2text-generation", *_OF_ANY),
    "decoder": ("text-generation", "text2text-generation", "chat", *_OF_ANY),
    "encoder": (*_OF_ANY, "multiple-choice", "text2text-generation"),
}


def choose_task(arguments: FinetuningArguments, source: ModelSource) -> Task:
    """Returns the task given by the arguments, or implied by model and file.

    Raises:
        ValueError: The model does not learn the task.
    """
    fitting = TRANSFORMERS_TASKS[source.shape]
    if source.native:
        fitting = tuple(family(source.model_type).tasks)
    task = arguments.task or _infer_task(arguments, source, fitting)
    if task not in fitting:
        hint = ""
        if source.native and task in TRANSFORMERS_TASKS[source.shape]:
            hint = "; native=False does"
        raise ValueError(
            f"{source.folder} is a {source.shape} ({source.model_type}), which does not learn "
            f"{task}; it learns {' or '.join(fitting)}{hint}"
        )
    if arguments.crf and task != "token-classification":
        raise ValueError(
            f"crf is for token-classification, not for {task}: leave it out, or set "
            "task='token-classification'"
        )
    if task == "token-classification" and source.values.get("pointer_size") is not None:
        raise ValueError(
            f"{source.folder} has a global pointer (pointer_size), which learns spans, and "
            f"{task} has labels of tokens: train it with shardzoo.trainer.Trainer"
        )
    if arguments.crf and not source.native:
        raise ValueError(
            f"crf needs a model of the zoo, and {source.folder} is trained as transformers' "
            f"{source.model_type}: leave it out, or native=False"
        )
    return cast(Task, task)


def _infer_task(arguments: FinetuningArguments, source: ModelSource, fitting: Sequence[str]) -> str:
    """Returns the task that the first record of the training file is for."""
    if arguments.train_file is None:
        return fitting[0]
    path = find_source(arguments.train_file) or Path(arguments.train_file)
    record = first_record(path)
    if {"question", "context", "answers"} <= record.keys() or isinstance(record.get("data"), list):
        return "question-answering"
    if {"anchor", "positive"} <= record.keys() and "embedding" in fitting:
        return "embedding"
    if {"chosen", "rejected"} <= record.keys() and "preference" in fitting:
        return "preference"
    for key, task in ((arguments.messages_id, "chat"), (arguments.choices_id, "multiple-choice")):
        if isinstance(record.get(key), list):
            return task
    if isinstance(record.get(arguments.source_id), list) or path.suffix in WORD_SUFFIXES:
        return "token-classification"
    if "text-generation" not in fitting:
        return fitting[0]
    return "text2text-generation" if _holds_pairs(path, record, arguments) else "text-generation"


def _holds_pairs(path: Path, record: dict[str, Any], arguments: FinetuningArguments) -> bool:
    """Returns whether a file holds sources with targets rather than plain text (records with the
    key `text`).
    """
    if path.suffix in PAIR_SUFFIXES or Path(f"{path}.source").exists():
        return True
    if not record:
        return path.suffix in (".json", ".jsonl")  # the reader of pairs reports the error
    return {arguments.source_id, arguments.target_id} <= record.keys() or "text" not in record


def first_record(path: Path) -> dict[str, Any]:
    """Returns the first record of JSON lines, a parquet file or a `datasets` folder; empty if there
    is none.
    """
    if path.suffix == ".parquet" or (path.is_dir() and (path / "dataset_info.json").exists()):
        from datasets import Dataset, load_from_disk

        data: Any = load_from_disk(str(path)) if path.is_dir() else Dataset.from_parquet(str(path))
        if not isinstance(data, Dataset) or not len(data):
            return {}
        return dict(data[0])
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return {}
    record: Any = {}
    try:
        _, record = next(iter_json_records(path), (0, {}))
    except ValueError:
        # It may be one object over several lines, such as SQuAD's.
        with suppress(ValueError):
            record = parse_json_text(path.read_bytes(), str(path))
    return record if isinstance(record, dict) else {}


def label_names(labels: Iterable[str]) -> list[str]:
    """Returns the distinct labels in the order of their classes: numbers by value, names
    alphabetically.
    """
    distinct = set(labels)
    numbers = all(label.isdecimal() for label in distinct)
    return sorted(distinct, key=int) if numbers else sorted(distinct)


def stored_labels(source: ModelSource, task: str) -> list[str] | None:
    """Returns the labels of a stored classifier by class; None if the model has no classifier for
    the task.
    """
    names = source.values.get("id2label")
    architecture = str((source.values.get("architectures") or [""])[0])
    head = "ForSequenceClassification"
    if task == "token-classification":
        head = "ForTokenClassification"
    if not architecture.endswith(head):
        return None
    if not isinstance(names, dict):
        return ["LABEL_0", "LABEL_1"]  # transformers' default
    return [str(names[number]) for number in sorted(names, key=int)]


def infer_problem(labels: Sequence[Any]) -> ProblemType:
    """Returns the problem type that labels imply: names of classes, lists of names, or numbers of
    which one has a fraction or a point."""
    if any(isinstance(label, tuple) for label in labels):
        return "multi_label_classification"
    if any(isinstance(label, float) for label in labels):
        return "regression"
    return "single_label_classification"


class Labels:
    """The labels that a model learns.

    Attributes:
        names: The names, in the order of the classes.
        problem: What a label is: one class, several classes, or a number, which has no names.
        stored: Whether the stored model has a classifier for them.
    """

    def __init__(self, names: Sequence[str], problem: ProblemType, *, stored: bool = True) -> None:
        self.names = list(names)
        self.problem = problem
        self.stored = stored
        self._classes = {name: number for number, name in enumerate(self.names)}
        # A model without label names has these; then the labels of the data are numbers.
        if self.names == [f"LABEL_{number}" for number in range(len(self.names))]:
            self._classes |= {str(number): number for number in range(len(self.names))}

    def covers(self, labels: Iterable[str]) -> bool:
        """Returns whether the model has a class for all labels."""
        return all(label in self._classes for label in labels)

    def find_class(self, label: Any) -> int:
        """Returns the number of a label's class. ValueError if there is none."""
        if label not in self._classes:
            few = ", ".join(self.names[:10]) + (", …" if len(self.names) > 10 else "")
            raise ValueError(f"the label {label!r} is not one of the model's: {few}")
        return self._classes[label]

    def target(self, label: Any) -> np.ndarray:
        """Returns a label as the model takes it: int64 [], float32 [] for a number, or float32 [C]
        for several.
        """
        if self.problem == "regression":
            try:
                return np.array(float(label), np.float32)
            except (TypeError, ValueError):
                raise ValueError(
                    f"the label {label!r} is not a number, which regression needs"
                ) from None
        if self.problem == "multi_label_classification":
            several = label if isinstance(label, tuple) else (label,)
            classes = [self.find_class(name) for name in several]
            return np.isin(np.arange(len(self.names)), classes).astype(np.float32)
        return np.array(self.find_class(label), np.int64)

    def head(self, task: str) -> dict[str, Any] | None:
        """Returns the settings of a new classifier in the model's configuration; None if it has
        one.
        """
        if self.stored:
            return None
        # A regression has one output without a name.
        names = self.names or ["LABEL_0"]
        settings: dict[str, Any] = {
            "num_labels": len(names),
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }
        # transformers writes the problem type of sequences only, and one class of several is its
        # default.
        if task == "text-classification" and self.problem != "single_label_classification":
            settings["problem_type"] = self.problem
        return settings


def find_labels(
    arguments: FinetuningArguments, task: str, source: ModelSource, labels: Sequence[Any] | None
) -> Labels:
    """Returns the labels of a task: those of the stored classifier if it covers the training
    data's.

    Args:
        labels: Of the training data, as its records have them (a list of words' labels is
            flattened); None without.

    Raises:
        ValueError: There are fewer than two classes, or neither data nor a classifier.
    """
    names = stored_labels(source, task)
    known = source.values.get("problem_type")
    if not known and names is not None and len(names) == 1:
        known = "regression"
    if labels is None:
        if names is None:
            raise ValueError(
                f"{source.folder} has no classifier, and without train_file its labels are unknown"
            )
        return Labels(names, arguments.problem_type or known or "single_label_classification")
    problem: ProblemType = "single_label_classification"
    if arguments.problem_type:
        problem = arguments.problem_type
    elif task == WITH_LABELS[0]:
        problem = infer_problem(labels)
    if problem == "regression":
        return Labels([], problem, stored=names is not None and len(names) == 1)
    found: list[str] = []
    for label in labels:
        found += label if isinstance(label, tuple) else (str(label),)
    distinct = label_names(found)
    if names is not None and Labels(names, problem).covers(distinct) and known in (None, problem):
        return Labels(names, problem)
    least = 1 if problem == "multi_label_classification" else 2
    if len(distinct) < least:
        of = repr(distinct[0]) if distinct else "empty"
        raise ValueError(f"all labels of {arguments.train_file} are {of}; at least 2 are needed")
    return Labels(distinct, problem, stored=False)
