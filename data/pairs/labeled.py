"""Makes fine-tuning samples of labeled texts: classes, numbers, labels of words, answers in a text, and choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..objectives.labels import IGNORED
from ..text.records import check_text
from .pairs import fields_of, load_records, read_sides, side_files

Label = str | float | tuple[str, ...]


@dataclass(frozen=True)
class LabeledText:
    """A text, or two, with a class (its name), a number, or the names of several labels."""

    text: str
    pair: str | None
    label: Label
    weight: float = 1.0


@dataclass(frozen=True)
class LabeledWords:
    """The words of a text, and the label of each."""

    words: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Choices:
    """Continuations of a text, and the number of the right one."""

    text: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Question:
    """A question about a text. `answers` are (text, first character); empty if the text has no answer."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


def load_labeled(
    path: str | Path,
    *,
    source_id: str = "s",
    target_id: str = "t",
    pair_id: str | None = None,
    weight_id: str | None = None,
    prefix: str = "",
) -> Sequence[LabeledText]:
    """Loads texts with labels, in the formats of `load_pairs`.

    A label is a string or a whole number (a class), another number, or a list of strings and whole numbers.

    Args:
        pair_id: key of a second text.
        weight_id: key of the record's weight in the loss.

    Raises ValueError as `load_records` does.
    """

    def parse(record: Any) -> LabeledText:
        keys = [key for key in (pair_id, weight_id) if key is not None]
        text, label, *others = fields_of(record, source_id, target_id, *keys)
        second = None if pair_id is None else check_text(others[0], f"the value of {pair_id!r}")
        weight = 1.0 if weight_id is None else number(others[-1], weight_id)
        if weight < 0:
            raise ValueError(f"the value of {weight_id!r} must not be negative, but is {weight}")
        return LabeledText(
            prefix + check_text(text, f"the value of {source_id!r}"),
            second,
            label_of(label),
            weight,
        )

    sides = side_files(Path(path))
    if sides is None:
        return load_records(path, parse)
    return [LabeledText(prefix + text, None, label) for text, label in read_sides(*sides)]


def label_of(value: Any) -> Label:
    """Returns the label that a record's value means. ValueError for a value of another kind."""
    if isinstance(value, list):
        return tuple(_name(entry) for entry in value)
    if isinstance(value, float):
        return number(value, "label")
    return _name(value)


def _name(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_text(value, "a label")


def number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"the value of {key!r} must be a finite number, not {value!r}")
    return float(value)


def load_labeled_words(
    path: str | Path, *, source_id: str = "s", target_id: str = "t"
) -> Sequence[LabeledWords]:
    """Loads lists of words with a list of labels, or CoNLL's lines `word … label` with a blank line after each text.

    A file that does not begin with `{` is in CoNLL's format. Raises ValueError as `load_records` does.
    """
    path = Path(path)
    if path.is_file() and path.suffix != ".parquet":
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"{")
        if not first.lstrip().startswith(b"{"):
            return _from_conll(path)

    def parse(record: Any) -> LabeledWords:
        words, labels = fields_of(record, source_id, target_id)
        if not isinstance(words, list) or not isinstance(labels, list) or not words:
            raise ValueError(
                f"the values of {source_id!r} and {target_id!r} must be lists of words and labels"
            )
        if len(words) != len(labels):
            raise ValueError(f"there are {len(words)} words, but {len(labels)} labels")
        return LabeledWords(
            tuple(check_text(word, "a word") for word in words), tuple(map(_name, labels))
        )

    return load_records(path, parse)


def _from_conll(path: Path) -> list[LabeledWords]:
    found: list[LabeledWords] = []
    words: list[str] = []
    labels: list[str] = []
    for place, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        columns = line.split()
        if columns and columns[0] != "-DOCSTART-":
            if len(columns) < 2:
                raise ValueError(
                    f"bad record in {path}, line {place}: {line!r:.60} is not a word and a label"
                )
            words.append(columns[0])
            labels.append(columns[-1])
        elif words:
            found.append(LabeledWords(tuple(words), tuple(labels)))
            words, labels = [], []
    return found


def load_choices(
    path: str | Path,
    *,
    source_id: str = "s",
    target_id: str = "t",
    choices_id: str = "choices",
    pair_id: str | None = None,
    prefix: str = "",
) -> Sequence[Choices]:
    """Loads texts with possible continuations, and the number or the text of the right one.

    Args:
        pair_id: key of a text that begins each continuation.

    Raises ValueError as `load_records` does.
    """

    def parse(record: Any) -> Choices:
        keys = (source_id, choices_id, target_id, *(() if pair_id is None else (pair_id,)))
        text, choices, label, *second = fields_of(record, *keys)
        if not isinstance(choices, list) or len(choices) < 2:
            raise ValueError(
                f"the value of {choices_id!r} must be a list of at least 2 texts, not {choices!r:.60}"
            )
        texts = [check_text(choice, "a choice") for choice in choices]
        right = texts.index(label) if label in texts else label
        if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(texts):
            raise ValueError(
                f"the value of {target_id!r} must be a choice or its number, not {label!r}"
            )
        begin = check_text(second[0], f"the value of {pair_id!r}") + " " if second else ""
        return Choices(
            prefix + check_text(text, "a text"), tuple(begin + choice for choice in texts), right
        )

    return load_records(path, parse)


def load_questions(path: str | Path) -> Sequence[Question]:
    """Loads questions in SQuAD's format: its nested JSON file, or records with question, context and answers.

    Raises ValueError as `load_records` does, and if an answer is not in the text where it is said to be.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError:
            content = None  # JSON lines
        if isinstance(content, dict) and isinstance(content.get("data"), list):
            try:
                return [_question(record) for record in _flattened(content["data"])]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"bad record in {path}: {error}") from None
    return load_records(path, _question)


def _flattened(articles: list[Any]) -> Iterator[dict[str, Any]]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = entry.get("answers", [])
                yield {
                    "question": entry["question"],
                    "context": paragraph["context"],
                    "answers": {
                        name: [answer[name] for answer in answers]
                        for name in ("text", "answer_start")
                    },
                }


def _question(record: Any) -> Question:
    question, context, answers = fields_of(record, "question", "context", "answers")
    texts, starts = fields_of(answers, "text", "answer_start")
    found = tuple(zip(texts, starts, strict=True))
    for text, start in found:
        if context[start : start + len(text)] != text:
            raise ValueError(f"the answer {text!r} is not at character {start} of its context")
    return Question(
        check_text(question, "the question").lstrip(), check_text(context, "the context"), found
    )


class Encoder:
    """Encodes texts with transformers' tokenizer as a model of several segments reads them.

    Args:
        segments: whether the model tells the first text from the second by `token_type_ids`.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, segments: bool = False) -> None:
        self.tokenizer, self.max_length, self.segments = tokenizer, max_length, segments

    def __call__(self, text: Any, pair: Any = None, **options: Any) -> Any:
        options = {"truncation": True, "max_length": self.max_length, "verbose": False, **options}
        return self.tokenizer(text, pair, return_token_type_ids=self.segments, **options)

    def inputs(self, encoded: Any) -> dict[str, np.ndarray]:
        names = ("input_ids", "token_type_ids") if self.segments else ("input_ids",)
        return {name: np.array(encoded[name], np.int64) for name in names}


class ClassifiedTexts:
    """Makes `{"input_ids": [s], "labels": …}` of labeled texts.

    Args:
        target: returns the array of a label.
        change: returns the text that is encoded for a record's.
        weighs: whether to add the records' weights as `sample_weight` [].
    """

    def __init__(
        self,
        records: Sequence[LabeledText],
        encoder: Encoder,
        target: Callable[[Any], np.ndarray],
        change: Callable[[str], str],
        *,
        weighs: bool = False,
    ) -> None:
        self.records, self.encoder, self.target, self.change, self.weighs = (
            records,
            encoder,
            target,
            change,
            weighs,
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        record = self.records[index]
        inputs = self.encoder.inputs(self.encoder(self.change(record.text), record.pair))
        weight = {"sample_weight": np.array(record.weight, np.float32)} if self.weighs else {}
        return {**inputs, "labels": self.target(record.label), **weight}


class ClassifiedWords:
    """Makes `{"input_ids": [s], "labels": [s]}`: a word's class at its first piece, −100 elsewhere."""

    def __init__(
        self, records: Sequence[LabeledWords], encoder: Encoder, target: Callable[[Any], np.ndarray]
    ) -> None:
        if not getattr(encoder.tokenizer, "is_fast", False):
            raise ValueError(
                "labels of words need a tokenizer that tells the word of a piece: one with tokenizer.json"
            )
        self.records, self.encoder, self.target = records, encoder, target

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        record = self.records[index]
        encoded = self.encoder(list(record.words), is_split_into_words=True)
        labels, last = [], None
        for word in encoded.word_ids():
            labels.append(
                IGNORED if word is None or word == last else int(self.target(record.labels[word]))
            )
            last = word
        return {**self.encoder.inputs(encoded), "labels": np.array(labels, np.int64)}


class ChoiceSamples:
    """Makes `{"input_ids": [c, s], "attention_mask": [c, s], "labels": number}` of a text with c continuations."""

    def __init__(self, records: Sequence[Choices], encoder: Encoder, pad_token_id: int) -> None:
        self.records, self.encoder, self.pad_token_id = records, encoder, pad_token_id
        counts = {len(records[number].choices) for number in range(len(records))}
        if len(counts) > 1:
            raise ValueError(
                f"all records need equally many choices, not {' and '.join(map(str, sorted(counts)))}"
            )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        record = self.records[index]
        rows = [self.encoder.inputs(self.encoder(record.text, choice)) for choice in record.choices]
        longest = max(len(row["input_ids"]) for row in rows)
        sample = {
            "attention_mask": np.stack([np.arange(longest) < len(row["input_ids"]) for row in rows])
        }
        for name in rows[0]:
            fill = self.pad_token_id if name == "input_ids" else 0
            padded = [
                np.pad(row[name], (0, longest - len(row[name])), constant_values=fill)
                for row in rows
            ]
            sample[name] = np.stack(padded)
        return {
            **sample,
            "attention_mask": sample["attention_mask"].astype(np.int64),
            "labels": np.array(record.label),
        }


class AnswerSpans:
    """Makes `{"input_ids": [s], "start_positions": token, "end_positions": token}` of questions about long texts.

    A text that does not fit is cut into windows that overlap by `stride` tokens, each with the question before it.
    Where a window does not have the answer, both positions are those of the [CLS] token, or of the first one.

    Attributes:
        windows: for each sample the number of its question, the characters of the text that each token has (None for
            other tokens), and the token for no answer.
    """

    def __init__(self, records: Sequence[Question], encoder: Encoder, stride: int) -> None:
        if not getattr(encoder.tokenizer, "is_fast", False):
            raise ValueError(
                "answers need a tokenizer that tells the characters of a token: one with tokenizer.json"
            )
        self.records, self.encoder = records, encoder
        self.windows: list[tuple[int, list[Any], int]] = []
        self._samples: list[dict[str, np.ndarray]] = []
        for question in range(len(records)):
            self._add(question, stride)

    def _add(self, question: int, stride: int) -> None:
        record = self.records[question]
        options = {
            "return_overflowing_tokens": True,
            "return_offsets_mapping": True,
            "stride": stride,
        }
        try:
            encoded = self.encoder(
                [record.question], [record.context], truncation="only_second", **options
            )
        except Exception as error:  # the Rust library raises bare exceptions
            raise ValueError(
                f"the question {record.question!r:.60} and a stride of {stride} do not fit max_source_length="
                f"{self.encoder.max_length}: {error}"
            ) from None
        for window in range(len(encoded["input_ids"])):
            sequence, offsets = encoded.sequence_ids(window), encoded["offset_mapping"][window]
            places = [
                (*place,) if of == 1 else None for place, of in zip(offsets, sequence, strict=True)
            ]
            inputs = {
                name: values[window] for name, values in encoded.items() if name != "offset_mapping"
            }
            sample = self.encoder.inputs(inputs)
            cls = self.encoder.tokenizer.cls_token_id
            ids = sample["input_ids"].tolist()
            absent = ids.index(cls) if cls in ids else 0
            start, end = span_of(record.answers, places, absent)
            self._samples.append(
                {**sample, "start_positions": np.array(start), "end_positions": np.array(end)}
            )
            self.windows.append((question, places, absent))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._samples[index]


def span_of(
    answers: Sequence[tuple[str, int]], places: Sequence[tuple[int, int] | None], absent: int
) -> tuple[int, int]:
    """Returns the first and the last token of the first answer; `absent` twice if the window lacks a part of it."""
    inside = [(token, *place) for token, place in enumerate(places) if place is not None]
    if not answers or not inside:
        return absent, absent
    text, first = answers[0]
    starts = [token for token, start, _ in inside if start <= first]
    ends = [token for token, _, end in inside if end >= first + len(text)]
    return (starts[-1], ends[0]) if starts and ends else (absent, absent)
