"""The files of a fine-tuning run as records and samples."""

from __future__ import annotations

from typing import Any

from .arguments import TrainerArguments
from .loading import Source
from .samples import Chosen, Split, TextTokenizer, held_out, make_samples, read_records
from .tasks import Labels, label_names, stored_labels


class TuningData:
    """Reads each file once. prompt: tokens that are put before every source.

    labels: of a classifier, else None. new_labels: their names, if the stored model has no classifier for them.
    """

    def __init__(self, arguments: TrainerArguments, task: str, source: Source, tokenizer: TextTokenizer) -> None:
        self.arguments, self.task, self.source, self.tokenizer = arguments, task, source, tokenizer
        self.prompt: list[str] = []
        self.positions: int | None = None
        self._records: Any = None
        self._split: Split | None = None
        self._validation: Any = None
        self.labels: Labels | None = None
        self.new_labels: list[str] | None = None
        if task == "text-classification":
            self._choose_labels()

    def _choose_labels(self) -> None:
        stored = stored_labels(self.source)
        if self.arguments.train_file is not None:
            found = label_names(label for _, label in self._train_records())
            if stored is None or not Labels(stored).covers(found):
                self.new_labels = found
        elif stored is None:
            raise ValueError(f"{self.source.folder} has no classifier, and without train_file its labels are unknown")
        self.labels = Labels(self.new_labels or stored or [])
        if len(self.labels.names) < 2:
            raise ValueError(
                f"all labels of {self.arguments.train_file} are {self.labels.names[0]!r}: nothing to learn"
            )

    def check_lengths(self, positions: int | None) -> None:
        """ValueError if samples may be longer than what the model reads at most."""
        self.positions = positions
        if positions is None:
            return
        arguments = self.arguments
        asked = {
            "text-generation": {"block_size": arguments.block_size or 0},
            "text-classification": {"max_source_length": arguments.max_source_length},
        }.get(
            self.task,
            {"max_source_length": arguments.max_source_length, "max_target_length": arguments.max_target_length},
        )
        if sum(asked.values()) > positions:
            named = " + ".join(f"{name}={value}" for name, value in asked.items())
            raise ValueError(f"{named} is more than the {positions} positions of the model; use less")

    def train(self, valid: bool) -> Any:
        """Records to train on. valid: whether some of them validate where there is no validation_file."""
        if not valid or self.arguments.validation_file is not None:
            return self._train_records()
        return self._split_records().train

    def validation(self) -> Any:
        """Records that validate; None if there are none."""
        if self._validation is None:
            if self.arguments.validation_file is not None:
                found = self.read(self.arguments.validation_file, self.arguments.max_eval_samples)
            elif self.arguments.train_file is None:
                return None
            else:
                found = self._split_records().valid
                found = None if found is None else _first(found, self.arguments.max_eval_samples)
            self._validation = found
        return self._validation

    def read(self, path: str, most: int | None) -> Any:
        records = read_records(path, self.task, self.arguments, self.tokenizer, self.positions)
        records = _first(records, most)
        if self.labels is not None:
            for number in range(len(records)):
                self.labels.class_of(records[number][1])
        return records

    def samples(self, records: Any) -> Any:
        return make_samples(
            records,
            self.task,
            self.source.shape == "decoder",
            self.arguments,
            self.tokenizer,
            self.prepare_source,
            self.labels,
        )

    def prepare_source(self, text: str) -> str:
        """With the soft prompt before it, unless it has a place of its own in the text."""
        if any(token in text for token in self.prompt):
            return text
        return "".join(self.prompt) + text

    def _train_records(self) -> Any:
        if self._records is None:
            assert self.arguments.train_file is not None
            self._records = self.read(self.arguments.train_file, self.arguments.max_train_samples)
        return self._records

    def _split_records(self) -> Split:
        if self._split is None:
            self._split = held_out(self._train_records(), self.arguments.validation_split, self.arguments.seed)
        return self._split


def _first(records: Any, most: int | None) -> Any:
    return records if most is None or most >= len(records) else Chosen(records, range(most))
