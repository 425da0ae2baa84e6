"""Makes fine-tuning samples: pairs for encoder-decoders and decoders, and blocks of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..objectives.labels import IGNORED
from ..tokenizers.tokenizer import Tokenizer
from .pairs import Pair


def closed(ids: list[int], length: int, end: int) -> np.ndarray:
    """Returns `ids` cut to `length - 1` tokens and followed by one `end`: int64."""
    return np.array([*ids[: length - 1], end], np.int64)


def opened(ids: list[int], length: int, begin: Sequence[int]) -> np.ndarray:
    """Returns `begin` followed by as many of the last `ids` as fit `length`: int64."""
    return np.array([*begin, *ids[-max(1, length - len(begin)) :]], np.int64)


class Seq2SeqDataset:
    """Makes `{"input_ids": [s], "labels": [t]}` of a pair, each ending with one end-of-sequence token.

    The maximum lengths include all tokens. `begin` are ids before both.
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
        if min(max_source_length, max_target_length) < 2:
            raise ValueError("max_source_length and max_target_length must be at least 2: a token and its end")
        self.pairs, self.tokenizer, self.begin = pairs, tokenizer, list(begin)
        self.max_source_length, self.max_target_length = max_source_length, max_target_length
        self.end = tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = self.tokenizer.encode_batch(list(self.pairs[index]))
        return {
            "input_ids": closed(self.begin + source, self.max_source_length, self.end),
            "labels": closed(self.begin + target, self.max_target_length, self.end),
        }


class PromptDataset:
    """Makes a decoder's sample of a pair: source and target in one sequence, ending with one end-of-sequence token.

    Labels are −100 on the source. A source that is too long loses its beginning, because its end holds the
    instruction. `separator` is text after the source, and `begin` ids before it; max_source_length includes both.
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
        if max_source_length < 1 or max_target_length < 2:
            raise ValueError("max_source_length must be at least 1 and max_target_length at least 2")
        self.pairs, self.tokenizer, self.separator, self.begin = pairs, tokenizer, separator, list(begin)
        self.max_source_length, self.max_target_length = max_source_length, max_target_length
        self.end = tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        source, target = self.pairs[index]
        prompt, answer = self.tokenizer.encode_batch([source + self.separator, target])
        prompt = opened(prompt, self.max_source_length, self.begin)
        answer = closed(answer, self.max_target_length, self.end)
        return {
            "input_ids": np.concatenate([prompt, answer]),
            "labels": np.concatenate([np.full(len(prompt), IGNORED), answer]),
        }


class BlockDataset:
    """Makes a decoder's samples of plain text: documents, each followed by the end token, cut into equal blocks.

    The remainder after the last block is left out.
    """

    def __init__(self, documents: Iterable[str], tokenizer: Tokenizer, block_size: int) -> None:
        if block_size < 2:
            raise ValueError(f"block_size is {block_size}; predicting a next token needs at least 2")
        parts = [np.array([*tokenizer.encode(document), tokenizer.eos_token_id], np.int32) for document in documents]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if len(tokens) < block_size:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than one block of {block_size}")
        self.blocks = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = self.blocks[index].astype(np.int64)
        return {"input_ids": tokens, "labels": tokens.copy()}
