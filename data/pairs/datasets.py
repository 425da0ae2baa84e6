"""Makes fine-tuning samples for models that generate: pairs of texts, conversations and blocks of
plain text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..labels import IGNORED
from ..tokenizers.tokenizer import Tokenizer
from .pairs import Pair, load_records, read_fields


def truncate_with_end(ids: list[int], length: int, end: int) -> np.ndarray:
    """Returns `ids` cut to `length - 1` tokens and followed by one `end`: int64."""
    return np.array([*ids[: length - 1], end], np.int64)


def truncate_with_begin(ids: list[int], length: int, begin: Sequence[int]) -> np.ndarray:
    """Returns `begin` followed by as many of the last `ids` as fit `length`, but at least one:
    int64.
    """
    return np.array([*begin, *ids[-max(1, length - len(begin)) :]], np.int64)


def _check_limits(max_source_length: int, max_target_length: int, shortest_source: int) -> None:
    """Raises ValueError for limits that leave no place for a token and its end."""
    if max_source_length < shortest_source or max_target_length < 2:
        raise ValueError(
            f"max_source_length must be at least {shortest_source} and max_target_length at least "
            f"2, not {max_source_length} and {max_target_length}"
        )


class Seq2SeqDataset:
    """Makes `{"input_ids": [s], "labels": [t]}` of a pair, each ending with one end-of-sequence
    token.

    Args:
        pairs: (source, target) texts.
        tokenizer: Encodes both.
        max_source_length: Most tokens of a source, with its beginning and end.
        max_target_length: Most tokens of a target, with its beginning and end.
        begin: Ids before both.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: Tokenizer,
        *,
        max_source_length: int = 128,
        max_target_length: int = 128,
        begin: Sequence[int] = (),
    ) -> None:
        _check_limits(max_source_length, max_target_length, shortest_source=2)
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.begin = list(begin)
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.end = tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = self.tokenizer.encode_batch(list(self.pairs[index]))
        return {
            "input_ids": truncate_with_end(self.begin + source, self.max_source_length, self.end),
            "labels": truncate_with_end(self.begin + target, self.max_target_length, self.end),
        }


class PromptDataset:
    """Makes a decoder's sample of a pair: source and target in one sequence, ending with one end
    token.

    A label is that of its own position: the model shifts them. Labels are −100 on the source. A
    source that is too long loses its beginning, because its end holds the instruction.

    Args:
        pairs: (source, target) texts.
        tokenizer: Encodes both.
        max_source_length: Most tokens of a source, with `begin` and `separator`.
        max_target_length: Most tokens of a target, with its end.
        separator: Text after the source.
        begin: Ids before the source.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: Tokenizer,
        *,
        max_source_length: int = 128,
        max_target_length: int = 128,
        separator: str = "",
        begin: Sequence[int] = (),
    ) -> None:
        _check_limits(max_source_length, max_target_length, shortest_source=1)
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.separator = separator
        self.begin = list(begin)
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.end = tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = self.pairs[index]
        prompt, answer = self.tokenizer.encode_batch([source + self.separator, target])
        prompt = truncate_with_begin(prompt, self.max_source_length, self.begin)
        answer = truncate_with_end(answer, self.max_target_length, self.end)
        return {
            "input_ids": np.concatenate([prompt, answer]),
            "labels": np.concatenate([np.full(len(prompt), IGNORED), answer]),
        }


class BlockDataset:
    """Makes a decoder's samples of plain text: documents, each followed by the end token, cut into
    equal blocks.

    A label is that of its own position: the model shifts them. The remainder after the last block is left out.
    """

    def __init__(self, documents: Iterable[str], tokenizer: Tokenizer, block_size: int) -> None:
        if block_size < 2:
            raise ValueError(
                f"block_size is {block_size}; predicting a next token needs at least 2"
            )
        parts = [
            np.array([*tokenizer.encode(document), tokenizer.eos_token_id], np.int32)
            for document in documents
        ]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if len(tokens) < block_size:
            raise ValueError(
                f"the text has {len(tokens)} tokens, fewer than one block of {block_size}"
            )
        self.blocks = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = self.blocks[index].astype(np.int64)
        return {"input_ids": tokens, "labels": tokens.copy()}


class PrefixMaskedDataset:
    """Makes samples of pairs for an encoder that learns to generate (UniLM, Dong et al., 2019,
    section 2.3).

    A sample is `[CLS] source [SEP] target [SEP]`: `input_ids` [s], `token_type_ids` [s] (0 and 1),
    `labels` [s] (each position from the first [SEP] on predicts the next token; −100 elsewhere) and
    `attention_mask` [], the length of the first part, which all positions attend to. The second
    part attends causally to itself.

    Args:
        ends: Ids of [CLS] and [SEP].
        segments: Whether to make `token_type_ids`.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: Tokenizer,
        ends: tuple[int | None, int | None],
        *,
        segments: bool = True,
        max_source_length: int = 128,
        max_target_length: int = 128,
    ) -> None:
        cls, sep = ends
        if cls is None or sep is None:
            raise ValueError(
                "an encoder generates between [CLS] and [SEP], which its tokenizer does not have"
            )
        _check_limits(max_source_length, max_target_length, shortest_source=2)
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.cls = cls
        self.sep = sep
        self.segments = segments
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = self.tokenizer.encode_batch(list(self.pairs[index]))
        first = truncate_with_end([self.cls, *source], self.max_source_length, self.sep)
        second = truncate_with_end(target, self.max_target_length, self.sep)
        ids = np.concatenate([first, second])
        labels = np.full(len(ids), IGNORED)
        labels[len(first) - 1 : -1] = second
        sample = {"input_ids": ids, "labels": labels, "attention_mask": np.array(len(first))}
        if self.segments:
            sample["token_type_ids"] = np.repeat([0, 1], [len(first), len(second)])
        return sample


class BlankDataset:
    """Makes GLM's samples of pairs: the target fills the source's blank (Du et al., 2022, section
    2.1).

    The blank is the source's first `[MASK]`, `[sMASK]` or `[gMASK]`, or a `[gMASK]` at its end. The
    format of samples is that of `BlankInfilling`; a label is the next token, already shifted.

    Args:
        blank_text: The `BlankText` of the family: `encode` returns the ids of a source, `tokens` those of
            special tokens.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        blank_text: Any,
        *,
        max_source_length: int = 128,
        max_target_length: int = 128,
    ) -> None:
        _check_limits(max_source_length, max_target_length, shortest_source=2)
        self.pairs = pairs
        self.blank_text = blank_text
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = self.pairs[index]
        tokens = self.blank_text.tokens
        context = self.blank_text.encode(source)
        if len(context) > self.max_source_length:
            # The beginning is cut, because the blank, which may be at the end, must remain.
            context = [context[0], *context[1 - self.max_source_length :]]
        masks = (tokens.mask, tokens.smask, tokens.gmask)
        blank = next((place for place, token in enumerate(context) if token in masks), None)
        if blank is None:
            raise ValueError(
                f"the blank of the source {source!r:.60} is not among its last tokens; "
                "use a longer limit"
            )
        answer = truncate_with_end(
            self.blank_text.tokenizer.encode(target), self.max_target_length, tokens.eop
        )
        # All tokens of the answer have the position of the blank, and count from 1 within it.
        positions = np.concatenate([np.arange(len(context)), np.full(len(answer), blank)])
        within = np.concatenate([np.zeros(len(context), np.int64), np.arange(1, len(answer) + 1)])
        return {
            "input_ids": np.concatenate([context, [tokens.sop], answer[:-1]]).astype(np.int64),
            "position_ids": np.stack([positions, within]),
            "labels": np.concatenate([np.full(len(context), IGNORED), answer]),
            "attention_mask": np.array(len(context)),
        }


Message = dict[str, str]


def load_chats(path: str | Path, *, messages_id: str = "messages") -> Sequence[list[Message]]:
    """Loads conversations: lists of `{"role": …, "content": …}`, with a message of the assistant in
    each.

    Raises:
        ValueError: See `load_records`.
    """

    def parse(record: Any) -> list[Message]:
        (messages,) = read_fields(record, messages_id)
        is_valid = isinstance(messages, list) and all(
            isinstance(message, dict) and {"role", "content"} <= message.keys()
            for message in messages
        )
        if not is_valid:
            raise ValueError(f"{messages_id!r} must be a list of objects with 'role' and 'content'")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{messages_id!r} has no message of the assistant")
        return messages

    return load_records(path, parse)


class ChatDataset:
    """Makes a decoder's samples of conversations, written by the tokenizer's chat template.

    Labels are −100 except on the assistant's messages, with the end that the template gives them:
    what the template marks by `{% generation %}`, or what it adds to the text before them.
    Conversations are cut at `max_length` tokens.

    Args:
        tokenizer: transformers' tokenizer.
    """

    def __init__(self, chats: Sequence[list[Message]], tokenizer: Any, max_length: int) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template or not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "conversations need a tokenizer with a chat_template and a tokenizer.json; "
                "set chat_template in its tokenizer_config.json, or use pairs"
            )
        self.chats = chats
        self.tokenizer = tokenizer
        self.max_length = max_length
        # The tag `{% generation %}` or `{%- generation %}`, by which a template marks answers.
        self.is_marked = "generation %}" in str(template)

    def __len__(self) -> int:
        return len(self.chats)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        chat = self.chats[index]
        if self.is_marked:
            options = {"return_dict": True, "return_assistant_tokens_mask": True}
            encoded = self.tokenizer.apply_chat_template(chat, **options)
            is_answer = encoded["assistant_masks"]
        else:
            answers = self.find_answers(chat)
            encoded = self.tokenizer(
                self.render(chat),
                add_special_tokens=False,
                return_offsets_mapping=True,
                verbose=False,
            )
            is_answer = [
                any(first < stop and last > start for start, stop in answers)
                for first, last in encoded["offset_mapping"]
            ]
        tokens = np.array(encoded["input_ids"][: self.max_length], np.int64)
        labels = np.where(is_answer[: self.max_length], tokens, IGNORED)
        return {"input_ids": tokens, "labels": labels}

    def render(self, chat: list[Message], prompt: bool = False) -> str:
        """Returns the text of a conversation, which ends with the beginning of an answer if it is a
        `prompt`.
        """
        return self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt
        )

    def find_answers(self, chat: list[Message]) -> list[tuple[int, int]]:
        """Returns the characters [start, stop) of each message of the assistant in the rendered
        text.

        Raises:
            ValueError: The template changes earlier messages, so that they cannot be found.
        """
        whole = self.render(chat)
        found: list[tuple[int, int]] = []
        for number, message in enumerate(chat):
            if message["role"] == "assistant":
                before = self.render(chat[:number], prompt=True)
                after = self.render(chat[: number + 1])
                if not after.startswith(before) or not whole.startswith(after):
                    raise ValueError(
                        "the chat template changes earlier messages, so that the assistant's "
                        "cannot be found; mark them in the template by {% generation %} and "
                        "{% endgeneration %}"
                    )
                found.append((len(before), len(after)))
        return found
