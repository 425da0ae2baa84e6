"""Reads the records of a fine-tuning run's files, and makes samples of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..data import BlockDataset, PadBatch, PromptDataset, Seq2SeqDataset, iter_documents, load_pairs
from ..data.tokenizers.tokenizer import TransformersTokenizer
from ..models.common.language_model import IGNORED
from .arguments import FinetuningArguments
from .loading import ModelSource
from .tasks import Labels, label_names, stored_labels


class FinetuningData:
    """Gives the records and samples of the run's files. Reads each file once.

    Attributes:
        prompt: The soft prompt's tokens, which are put before every source.
        positions: The maximum number of tokens that the model reads; None if it is unlimited.
        labels: A classifier's labels; None for other tasks.
        new_labels: The names of the labels, if the stored model has no classifier for them.
    """

    def __init__(
        self, arguments: FinetuningArguments, task: str, source: ModelSource, tokenizer: TextTokenizer
    ) -> None:
        self.arguments, self.task, self.source, self.tokenizer = arguments, task, source, tokenizer
        self.prompt: list[str] = []
        self.positions: int | None = None
        self._records: Any = None
        self._split: HeldOutSplit | None = None
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
                f"all labels of {self.arguments.train_file} are {self.labels.names[0]!r}; at least 2 are needed"
            )

    def check_lengths(self, positions: int | None) -> None:
        """Raises ValueError if samples may be longer than the model's positions."""
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
            raise ValueError(f"{named} is more than the model's {positions} positions; use less")

    def train(self, valid: bool) -> Any:
        """Returns the records to train on, without those for validation if `valid` and there is no validation_file."""
        if not valid or self.arguments.validation_file is not None:
            return self._train_records()
        return self._split_records().train

    def validation(self) -> Any:
        """Returns the records for validation; None if there are none."""
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
        """Returns the text with the soft prompt before it, unless the text has one of its tokens."""
        if any(token in text for token in self.prompt):
            return text
        return "".join(self.prompt) + text

    def _train_records(self) -> Any:
        if self._records is None:
            assert self.arguments.train_file is not None
            self._records = self.read(self.arguments.train_file, self.arguments.max_train_samples)
        return self._records

    def _split_records(self) -> HeldOutSplit:
        if self._split is None:
            self._split = held_out(self._train_records(), self.arguments.validation_split, self.arguments.seed)
        return self._split


def _first(records: Any, most: int | None) -> Any:
    return records if most is None or most >= len(records) else Chosen(records, range(most))


LONGEST_BLOCK = 1024


class TextTokenizer(TransformersTokenizer):
    """Gives transformers' tokenizer the interface of `shardzoo.data`. It recognizes special tokens in text.

    Attributes:
        begin: Ids that the tokenizer puts before every text, such as a beginning-of-sequence token.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.vocab_size = len(backend)
        whole, bare = backend("a")["input_ids"], backend("a", add_special_tokens=False)["input_ids"]
        starts = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        self.begin: list[int] = whole[: next(starts, 0)]
        self.special = {"eos_token": backend.eos_token_id} if backend.eos_token_id is not None else {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.backend(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


class Chosen(Sequence[Any]):
    """A selection of records, in a given order."""

    def __init__(self, records: Sequence[Any], numbers: Sequence[int]) -> None:
        self.records, self.numbers = records, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.records[self.numbers[index]]


class SourcesChanged(Sequence[tuple[str, str]]):
    """Pairs with a function applied to their sources."""

    def __init__(self, pairs: Sequence[tuple[str, str]], change: Callable[[str], str]) -> None:
        self.pairs, self.change = pairs, change

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        source, target = self.pairs[index]
        return self.change(source), target


class ClassifiedTexts:
    """Makes `{"input_ids": [s], "labels": class}` of a text and its label; texts are cut at `max_length` tokens."""

    def __init__(self, pairs: Sequence[tuple[str, str]], tokenizer: Any, labels: Labels, max_length: int) -> None:
        self.pairs, self.tokenizer, self.labels, self.max_length = pairs, tokenizer, labels, max_length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        text, label = self.pairs[index]
        ids = self.tokenizer(text, truncation=True, max_length=self.max_length, verbose=False)["input_ids"]
        return {"input_ids": np.array(ids, np.int64), "labels": np.array(self.labels.class_of(label), np.int64)}


@dataclass(frozen=True)
class HeldOutSplit:
    train: Sequence[Any]
    valid: Sequence[Any] | None


def read_records(path: str, task: str, arguments: FinetuningArguments, tokenizer: TextTokenizer, longest: int | None):
    """Reads pairs of texts, pairs of text and label, or blocks of plain text. ValueError for a bad file."""
    if task == "text-generation":
        size = arguments.block_size or min(longest or LONGEST_BLOCK, LONGEST_BLOCK)
        return BlockDataset(iter_documents(path), tokenizer, size)
    return load_pairs(
        path,
        source_id=arguments.source_id,
        target_id=arguments.target_id,
        prefix=arguments.prefix,
        labels=task == "text-classification",
    )


def held_out(records: Any, percent: float, seed: int) -> HeldOutSplit:
    """Holds out `percent` of the records for validation, at least one unless 0. ValueError if none remains to train."""
    if percent == 0:
        return HeldOutSplit(records, None)
    count = max(1, round(len(records) * percent / 100))
    if count >= len(records):
        raise ValueError(
            f"the training file has {len(records)} sample(s), and validation_split={percent:g} leaves none to train "
            "on; name a validation_file, or train without validation"
        )
    order = np.random.default_rng(seed).permutation(len(records))
    return HeldOutSplit(
        Chosen(records, np.sort(order[count:]).tolist()), Chosen(records, np.sort(order[:count]).tolist())
    )


def make_samples(
    records: Any,
    task: str,
    is_decoder: bool,
    arguments: FinetuningArguments,
    tokenizer: TextTokenizer,
    prepare_source: Callable[[str], str],
    labels: Labels | None,
) -> Any:
    """Returns the samples that the model is trained on: dicts of arrays, each made when it is accessed."""
    if task == "text-generation":
        return records
    pairs = SourcesChanged(records, prepare_source)
    if labels is not None:
        return ClassifiedTexts(pairs, tokenizer.backend, labels, arguments.max_source_length)
    lengths = {
        "max_source_length": arguments.max_source_length,
        "max_target_length": arguments.max_target_length,
        "begin": tokenizer.begin,
    }
    if is_decoder:
        return PromptDataset(pairs, tokenizer, separator=arguments.separator, **lengths)
    return Seq2SeqDataset(pairs, tokenizer, **lengths)


class Collate:
    """Makes a padded batch of samples.

    Args:
        multiple_of: Lengths are rounded up to a multiple of this.
        learn_padding: Whether to pad labels with pad_token_id, which is then predicted, instead of -100.
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 1, *, learn_padding: bool = False) -> None:
        self.pad_token_id, self.learn_padding = pad_token_id, learn_padding
        self._pad = PadBatch(pad_token_id, multiple_of=multiple_of)

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self._pad(samples)
        if self.learn_padding:
            learned = batch["labels"][:, : max(len(sample["labels"]) for sample in samples)]
            learned[learned == IGNORED] = self.pad_token_id
        return batch
