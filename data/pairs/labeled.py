"""Makes fine-tuning samples of labeled texts: classes, numbers, labels of words, answers in a text,
and choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..labels import IGNORED
from ..text.lines import begins_json, parse_json_text, read_text_lines
from ..text.records import check_text
from .pairs import find_side_files, load_records, read_fields, read_sides

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
    """A question about a text.

    `answers` are (text, first character); empty if the text has no answer.
    """

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

    A label is a string or a whole number (a class), another number, or a list of strings and whole
    numbers.

    Args:
        pair_id: Key of a second text.
        weight_id: Key of the record's weight in the loss.

    Raises:
        ValueError: See `load_records`.
    """

    def parse(record: Any) -> LabeledText:
        keys = [key for key in (pair_id, weight_id) if key is not None]
        text, label, *others = read_fields(record, source_id, target_id, *keys)
        second = None if pair_id is None else check_text(others[0], f"the value of {pair_id!r}")
        weight = 1.0 if weight_id is None else parse_number(others[-1], weight_id)
        if weight < 0:
            raise ValueError(f"the value of {weight_id!r} must not be negative, but is {weight}")
        check_text(text, f"the value of {source_id!r}")
        return LabeledText(prefix + text, second, parse_label(label), weight)

    sides = find_side_files(Path(path))
    if sides is None:
        return load_records(path, parse)
    return [LabeledText(prefix + text, None, label) for text, label in read_sides(*sides)]


def parse_label(value: Any) -> Label:
    """Returns the label that a record's value means. ValueError for a value of another kind."""
    if isinstance(value, list):
        return tuple(_parse_name(entry) for entry in value)
    if isinstance(value, float):
        return parse_number(value, "label")
    return _parse_name(value)


def _parse_name(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_text(value, "a label")


def parse_number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"the value of {key!r} must be a finite number, not {value!r}")
    return float(value)


def load_labeled_words(
    path: str | Path, *, source_id: str = "s", target_id: str = "t"
) -> Sequence[LabeledWords]:
    """Loads lists of words with a list of labels, or CoNLL's lines `word … label` with a blank line
    after each text.

    A file that does not begin with a JSON object or array is in CoNLL's format.

    Raises:
        ValueError: See `load_records`.
    """
    path = Path(path)
    if path.is_file() and path.suffix != ".parquet" and not begins_json(path):
        return _read_conll(path)

    def parse(record: Any) -> LabeledWords:
        words, labels = read_fields(record, source_id, target_id)
        if not isinstance(words, list) or not isinstance(labels, list) or not words:
            raise ValueError(
                f"the values of {source_id!r} and {target_id!r} must be lists of words and labels"
            )
        if len(words) != len(labels):
            raise ValueError(f"there are {len(words)} words, but {len(labels)} labels")
        checked_words = tuple(check_text(word, "a word") for word in words)
        return LabeledWords(checked_words, tuple(map(_parse_name, labels)))

    return load_records(path, parse)


def _read_conll(path: Path) -> list[LabeledWords]:
    """Reads CoNLL's lines `word … label`. A blank line, or one of -DOCSTART-, ends a text."""
    found: list[LabeledWords] = []
    words: list[str] = []
    labels: list[str] = []
    lines = read_text_lines(path)
    for place, line in enumerate([*lines, ""], 1):
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
            words = []
            labels = []
    if not found:
        raise ValueError(f"{path} holds no records")
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
        pair_id: Key of a text that begins each continuation.

    Raises:
        ValueError: See `load_records`.
    """

    def parse(record: Any) -> Choices:
        keys = [source_id, choices_id, target_id]
        if pair_id is not None:
            keys.append(pair_id)
        text, choices, label, *second = read_fields(record, *keys)
        if not isinstance(choices, list) or len(choices) < 2:
            raise ValueError(
                f"the value of {choices_id!r} must be a list of at least 2 texts, "
                f"not {choices!r:.60}"
            )
        texts = [check_text(choice, "a choice") for choice in choices]
        right = texts.index(label) if label in texts else label
        if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(texts):
            raise ValueError(
                f"the value of {target_id!r} must be a choice or its number, not {label!r}"
            )
        begin = ""
        if second:
            begin = check_text(second[0], f"the value of {pair_id!r}") + " "
        continuations = tuple(begin + choice for choice in texts)
        return Choices(prefix + check_text(text, "a text"), continuations, right)

    return load_records(path, parse)


def load_questions(path: str | Path) -> Sequence[Question]:
    """Loads questions in SQuAD's format: its nested JSON file, or records with question, context
    and answers.

    Raises:
        ValueError: See `load_records`; or an answer is not in the text where it is said to be.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".json":
        try:
            content = parse_json_text(path.read_bytes(), str(path))
        except ValueError:
            content = None  # JSON lines
        if isinstance(content, dict) and isinstance(content.get("data"), list):
            try:
                return [_parse_question(record) for record in _flatten_squad(content["data"])]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"bad record in {path}: {error}") from None
    return load_records(path, _parse_question)


def _flatten_squad(articles: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields a record with question, context and answers for each question of SQuAD's articles."""
    for article in articles:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = entry.get("answers", [])
                texts = [answer["text"] for answer in answers]
                starts = [answer["answer_start"] for answer in answers]
                yield {
                    "question": entry["question"],
                    "context": paragraph["context"],
                    "answers": {"text": texts, "answer_start": starts},
                }


def _parse_question(record: Any) -> Question:
    question, context, answers = read_fields(record, "question", "context", "answers")
    texts, starts = read_fields(answers, "text", "answer_start")
    found = tuple(zip(texts, starts, strict=True))
    for text, start in found:
        if context[start : start + len(text)] != text:
            raise ValueError(f"the answer {text!r} is not at character {start} of its context")
    check_text(question, "the question")
    check_text(context, "the context")
    return Question(question.lstrip(), context, found)


class Encoder:
    """Encodes texts with transformers' tokenizer as a model of several segments reads them.

    Args:
        segments: Whether the model tells the first text from the second by `token_type_ids`.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, segments: bool = False) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.segments = segments

    def __call__(self, text: Any, pair: Any = None, **options: Any) -> Any:
        """Encodes a text, or two, or batches of them.

        `options` are those of transformers' tokenizer.
        """
        options = {"truncation": True, "max_length": self.max_length, "verbose": False, **options}
        return self.tokenizer(text, pair, return_token_type_ids=self.segments, **options)

    def extract_inputs(self, encoded: Any) -> dict[str, np.ndarray]:
        """Returns what the model reads of an encoded text: int64 [s] each."""
        inputs = {"input_ids": np.array(encoded["input_ids"], np.int64)}
        if self.segments:
            inputs["token_type_ids"] = np.array(encoded["token_type_ids"], np.int64)
        return inputs


class ClassifiedTexts:
    """Makes `{"input_ids": [s], "labels": …}` of labeled texts.

    Args:
        target: Returns the array of a label.
        change: Returns the text that is encoded for a record's.
        weighs: Whether to add the records' weights as `sample_weight` [].
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
        self.records = records
        self.encoder = encoder
        self.target = target
        self.change = change
        self.weighs = weighs

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        record = self.records[index]
        sample = self.encoder.extract_inputs(self.encoder(self.change(record.text), record.pair))
        sample["labels"] = self.target(record.label)
        if self.weighs:
            sample["sample_weight"] = np.array(record.weight, np.float32)
        return sample


class ClassifiedWords:
    """Makes samples of labeled words: `{"input_ids": [s], "labels": [s]}`.

    A label is the class of a word at its first piece, and −100 elsewhere.
    """

    def __init__(
        self, records: Sequence[LabeledWords], encoder: Encoder, target: Callable[[Any], np.ndarray]
    ) -> None:
        if not getattr(encoder.tokenizer, "is_fast", False):
            raise ValueError(
                "labels of words need a tokenizer that tells the word of a piece: "
                "one with tokenizer.json"
            )
        self.records = records
        self.encoder = encoder
        self.target = target

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        record = self.records[index]
        encoded = self.encoder(list(record.words), is_split_into_words=True)
        labels: list[int] = []
        last = None
        for word in encoded.word_ids():
            if word is None or word == last:
                labels.append(IGNORED)
            else:
                labels.append(int(self.target(record.labels[word])))
            last = word
        return {**self.encoder.extract_inputs(encoded), "labels": np.array(labels, np.int64)}


class ChoiceSamples:
    """Makes `{"input_ids": [c, s], "attention_mask": [c, s], "labels": number}` of a text with c
    continuations.
    """

    def __init__(self, records: Sequence[Choices], encoder: Encoder, pad_token_id: int) -> None:
        self.records = records
        self.encoder = encoder
        self.pad_token_id = pad_token_id
        counts = {len(records[number].choices) for number in range(len(records))}
        if len(counts) > 1:
            found = " and ".join(map(str, sorted(counts)))
            raise ValueError(f"all records need equally many choices, not {found}")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        record = self.records[index]
        rows: list[dict[str, np.ndarray]] = []
        for choice in record.choices:
            rows.append(self.encoder.extract_inputs(self.encoder(record.text, choice)))
        longest = max(len(row["input_ids"]) for row in rows)
        masks = [np.arange(longest) < len(row["input_ids"]) for row in rows]
        sample = {"attention_mask": np.stack(masks).astype(np.int64)}  # [c, s]
        for name in rows[0]:
            fill = self.pad_token_id if name == "input_ids" else 0
            padded: list[np.ndarray] = []
            for row in rows:
                missing = longest - len(row[name])
                padded.append(np.pad(row[name], (0, missing), constant_values=fill))
            sample[name] = np.stack(padded)  # [c, s]
        sample["labels"] = np.array(record.label)
        return sample


class AnswerSpans:
    """Makes `{"input_ids": [s], "start_positions": token, "end_positions": token}` of questions
    about long texts.

    A text that does not fit is cut into windows that overlap by `stride` tokens, each with the
    question before it. Where a window does not have the answer, both positions are those of the
    [CLS] token, or of the first one.

    Attributes:
        windows: For each sample the number of its question, the characters of the text that each
            token has (None for other tokens), and the token for no answer.
    """

    def __init__(self, records: Sequence[Question], encoder: Encoder, stride: int) -> None:
        if not getattr(encoder.tokenizer, "is_fast", False):
            raise ValueError(
                "answers need a tokenizer that tells the characters of a token: "
                "one with tokenizer.json"
            )
        self.records = records
        self.encoder = encoder
        self.windows: list[tuple[int, list[Any], int]] = []
        self._samples: list[dict[str, np.ndarray]] = []
        for question in range(len(records)):
            self._add_windows(question, stride)

    def _add_windows(self, question: int, stride: int) -> None:
        """Makes the samples of one question."""
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
        except Exception as error:  # The Rust library raises bare exceptions.
            raise ValueError(
                f"the question {record.question!r:.60} and a stride of {stride} do not fit "
                f"max_source_length={self.encoder.max_length}: {error}"
            ) from None
        for window in range(len(encoded["input_ids"])):
            # Sequence 0 is the question, sequence 1 the text; special tokens have None.
            places: list[tuple[int, int] | None] = []
            for offsets, sequence in zip(
                encoded["offset_mapping"][window], encoded.sequence_ids(window), strict=True
            ):
                places.append(tuple(offsets) if sequence == 1 else None)
            own = {
                name: values[window] for name, values in encoded.items() if name != "offset_mapping"
            }
            sample = self.encoder.extract_inputs(own)
            cls = self.encoder.tokenizer.cls_token_id
            ids = sample["input_ids"].tolist()
            absent = ids.index(cls) if cls in ids else 0
            start, end = find_token_span(record.answers, places, absent)
            sample["start_positions"] = np.array(start)
            sample["end_positions"] = np.array(end)
            self._samples.append(sample)
            self.windows.append((question, places, absent))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._samples[index]


def find_token_span(
    answers: Sequence[tuple[str, int]], places: Sequence[tuple[int, int] | None], absent: int
) -> tuple[int, int]:
    """Returns the first and the last token of the first answer.

    Args:
        answers: (text, first character) of each answer.
        places: First character, and the one after the last, of each token; None for tokens that
            are not of the text.
        absent: What is returned twice if the window lacks a part of the answer.
    """
    inside = [(token, *place) for token, place in enumerate(places) if place is not None]
    if not answers or not inside:
        return absent, absent
    text, first = answers[0]
    starts = [token for token, start, _ in inside if start <= first]
    ends = [token for token, _, end in inside if end >= first + len(text)]
    if not starts or not ends:
        return absent, absent
    return starts[-1], ends[0]
