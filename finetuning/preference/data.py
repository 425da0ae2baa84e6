"""Reads prompts with better and worse answers, as TRL's datasets have, and makes samples of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.labels import IGNORED
from ...data.pairs.pairs import load_records

# A text, or the messages of a conversation.
Text = str | list[dict[str, str]]
REFERENCE_KEYS = ("ref_chosen_logps", "ref_rejected_logps")  # TRL's columns


@dataclass(frozen=True)
class Preference:
    """A prompt and two answers; for KTO one answer and whether it is desirable.

    Attributes:
        answers: The better and the worse answer, or one.
        is_desirable: None for two answers.
        reference: The reference model's log-probabilities of the answers, if the file has them.
        margin: How much better the better answer is, for rewards; None if the file does not say it.
    """

    prompt: Text
    answers: tuple[Text, ...]
    is_desirable: bool | None = None
    reference: tuple[float, ...] = ()
    margin: float | None = None


def load_preferences(path: str | Path, *, paired: bool = True) -> Sequence[Preference]:
    """Loads `{"prompt", "chosen", "rejected"}`, or `{"prompt", "completion", "label"}` for KTO.

    All texts are strings, or all are lists of messages. Without a prompt it is what the messages of
    both answers have in common at their beginning.

    Args:
        paired: Whether a record has two answers.

    Raises:
        ValueError: See `load_records`.
    """
    return load_records(path, _read_pair if paired else _read_single)


def _read_pair(record: Any) -> Preference:
    if not isinstance(record, Mapping):
        raise ValueError(f"a {type(record).__name__} instead of an object with chosen and rejected")
    chosen = _read_text(record, "chosen")
    rejected = _read_text(record, "rejected")
    if "prompt" in record:
        prompt = _read_text(record, "prompt")
    elif isinstance(chosen, list) and isinstance(rejected, list):
        common = 0
        while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
            common += 1
        prompt = chosen[:common]
        chosen = chosen[common:]
        rejected = rejected[common:]
    else:
        raise ValueError("no key 'prompt', which only lists of messages may leave out")
    if len({type(text) for text in (prompt, chosen, rejected)}) > 1:
        raise ValueError("prompt, chosen and rejected must all be texts, or all lists of messages")
    reference: tuple[float, ...] = ()
    if all(key in record for key in REFERENCE_KEYS):
        reference = tuple(_read_number(record, key) for key in REFERENCE_KEYS)
    margin = None
    if record.get("margin") is not None:
        margin = _read_number(record, "margin")
    return Preference(prompt, (chosen, rejected), None, reference, margin)


def _read_number(record: Mapping[str, Any], key: str) -> float:
    """Returns a finite number of a record."""
    value = record[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"the value of {key!r} must be a number, not {value!r}")
    return float(value)


def _read_single(record: Any) -> Preference:
    if not isinstance(record, Mapping):
        raise ValueError(f"a {type(record).__name__} instead of an object with prompt")
    prompt = _read_text(record, "prompt")
    answer = _read_text(record, "completion")
    label = record.get("label")
    if not isinstance(label, bool):
        raise ValueError(f"the value of 'label' must be true or false, not {label!r}")
    if type(prompt) is not type(answer):
        raise ValueError("prompt and completion must both be texts, or both lists of messages")
    return Preference(prompt, (answer,), label)


def _read_text(record: Mapping[str, Any], key: str) -> Text:
    """Returns a text or a list of messages of a record."""
    value = record.get(key)
    if isinstance(value, str):
        return value
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
    )
    if not is_chat:
        found = ", ".join(map(repr, record))
        raise ValueError(
            f"{key!r} must be a text or a list of messages with 'role' and 'content'; the keys are "
            f"{found}"
        )
    return value  # type: ignore[return-value]


class PreferenceSamples:
    """Makes `{"columns": …, "targets": …}` of records: token ids and labels of each answer.

    A decoder reads the prompt with the answer after it, and labels are -100 on the prompt. An
    encoder-decoder reads the prompt, and the labels are the answer. An answer ends with the
    end-of-sequence token, as in TRL.

    Args:
        tokenizer: transformers' tokenizer.
        max_prompt, max_answer: Longer prompts and answers of an encoder-decoder are cut; a decoder
            reads at most as many tokens as both together, from the first on.
        shifts: Whether each record also gets the answer to the record before it, for KTO.
        reference: Log-probabilities of each record's answers by the reference model, [N, A].
    """

    def __init__(
        self,
        records: Sequence[Preference],
        tokenizer: Any,
        max_prompt: int,
        max_answer: int,
        *,
        has_decoder: bool,
        shifts: bool = False,
        reference: np.ndarray | None = None,
    ) -> None:
        self.records = records
        self.tokenizer = tokenizer
        self.max_prompt = max_prompt
        self.max_answer = max_answer
        self.has_decoder = has_decoder
        self.shifts = shifts
        self.reference = reference

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        answers = list(record.answers)
        if self.shifts:
            answers.append(self.records[index - 1].answers[0])
        pairs = [self._encode(record.prompt, answer) for answer in answers]
        sample: dict[str, Any] = {
            "columns": [ids for ids, _ in pairs],
            "targets": [labels for _, labels in pairs],
        }
        if record.is_desirable is not None:
            sample["is_desirable"] = record.is_desirable
        if self.reference is not None:
            sample["reference"] = self.reference[index]
        elif record.reference:
            sample["reference"] = np.array(record.reference, np.float32)
        return sample

    def _encode(self, prompt: Text, answer: Text) -> tuple[list[int], list[int]]:
        """Returns the ids that the model reads, and the labels."""
        if isinstance(prompt, list):
            before = render(self.tokenizer, prompt, prompt=True)
            assert isinstance(answer, list)
            whole = render(self.tokenizer, [*prompt, *answer])
            text = whole.removeprefix(before)
            adds_special_tokens = False
        else:
            assert isinstance(answer, str)
            before = prompt
            text = answer
            end = self.tokenizer.eos_token
            if end and not text.endswith(end) and not self.has_decoder:
                text += end
            whole = before + text
            adds_special_tokens = True
        if self.has_decoder:
            source = self._tokenize(before, adds_special_tokens)[: self.max_prompt]
            target = self.tokenizer(text_target=text, verbose=False)["input_ids"]
            if len(target) > self.max_answer:
                target = [*target[: self.max_answer - 1], target[-1]]
            return source, target
        start = self._tokenize(before, adds_special_tokens)
        ids = self._tokenize(whole, adds_special_tokens)[: self.max_prompt + self.max_answer]
        labels = [IGNORED] * min(len(start), len(ids)) + ids[len(start) :]
        return ids, labels

    def _tokenize(self, text: str, adds_special_tokens: bool) -> list[int]:
        options = {"add_special_tokens": adds_special_tokens, "verbose": False}
        return self.tokenizer(text, **options)["input_ids"]


def render(tokenizer: Any, messages: list[dict[str, str]], *, prompt: bool = False) -> str:
    """Returns the text of a conversation by the tokenizer's chat template.

    Args:
        prompt: Whether the text ends with the beginning of an answer.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "messages need a tokenizer with a chat_template: set it in tokenizer_config.json, or "
            "use texts"
        )
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


class RewardSamples:
    """Makes `{"columns": …, "margin": …}` of records: token ids of the prompt with each answer, and
    a margin of 0 where a record has none.

    Args:
        tokenizer: transformers' tokenizer.
        max_length: Longer texts are cut.
    """

    def __init__(self, records: Sequence[Preference], tokenizer: Any, max_length: int) -> None:
        self.records = records
        self.tokenizer = tokenizer
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        columns = [self._encode(record.prompt, answer) for answer in record.answers]
        return {"columns": columns, "margin": record.margin or 0.0}

    def _encode(self, prompt: Text, answer: Text) -> list[int]:
        options: dict[str, Any] = {"truncation": True, "max_length": self.max_length}
        options["verbose"] = False
        if isinstance(prompt, list):
            assert isinstance(answer, list)
            whole = render(self.tokenizer, [*prompt, *answer])
            return self.tokenizer(whole, add_special_tokens=False, **options)["input_ids"]
        assert isinstance(answer, str)
        whole = prompt + answer
        # The tokenizers of encoders put an end to a text themselves.
        end = self.tokenizer.eos_token
        if end and self.tokenizer.cls_token is None and not whole.endswith(end):
            ids = self.tokenizer(whole, **options)["input_ids"]
            if ids and ids[-1] == self.tokenizer.eos_token_id:
                return ids
            return [*ids[: self.max_length - 1], self.tokenizer.eos_token_id]
        return self.tokenizer(whole, **options)["input_ids"]


class PreferenceCollate:
    """Makes a batch of samples whose answers stand side by side.

    The batch has `input_ids` and `attention_mask`, int64 [B, A, S] for A answers; `targets`, int64
    [B, A, T] with -100 where there is no label; and what the samples have of `is_desirable` and
    `margin` [B], `reference` and `relevance` [B, A].
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 1) -> None:
        self.pad_token_id = pad_token_id
        self.multiple_of = multiple_of

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        columns = [sample["columns"] for sample in samples]
        batch = {
            "input_ids": self._pad(columns, self.pad_token_id),
            "attention_mask": self._pad([[[1] * len(ids) for ids in row] for row in columns], 0),
        }
        if "targets" in samples[0]:
            batch["targets"] = self._pad([sample["targets"] for sample in samples], IGNORED)
        if "is_desirable" in samples[0]:
            batch["is_desirable"] = torch.tensor([bool(s["is_desirable"]) for s in samples])
        if "margin" in samples[0]:
            batch["margin"] = torch.tensor([float(sample["margin"]) for sample in samples])
        if len({"reference" in sample for sample in samples}) > 1:
            raise ValueError(
                f"some records have {' and '.join(REFERENCE_KEYS)} and others do not; either all "
                "records have them, or none"
            )
        for name in ("reference", "relevance"):
            if name in samples[0]:
                rows = [torch.as_tensor(sample[name], dtype=torch.float32) for sample in samples]
                # A list that is shorter than others has no relevance where it has no documents.
                batch[name] = torch.nn.utils.rnn.pad_sequence(rows, True, -torch.inf)
        return batch

    def _pad(self, rows: Sequence[Sequence[Sequence[int]]], fill: int) -> Tensor:
        """Returns the numbers as int64 [B, A, S]."""
        answers = max(len(row) for row in rows)
        longest = max(1, *(len(ids) for row in rows for ids in row))
        length = -(-longest // self.multiple_of) * self.multiple_of
        padded = np.full((len(rows), answers, length), fill, np.int64)
        for number, row in enumerate(rows):
            for place, ids in enumerate(row):
                padded[number, place, : len(ids)] = ids
        return torch.from_numpy(padded)
