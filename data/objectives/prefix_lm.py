"""Makes samples for prefix language modeling: predict the end of a text from its beginning.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020,
section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer
from .labels import IGNORED
from .packed import ObjectiveDataset
from .pretraining import Seq2SeqObjective, objective


@dataclass(frozen=True)
class PrefixLM:
    """Splits a text at a uniformly random position into a prefix and the rest to predict.

    With `decoder_only` the sample is one sequence whose labels are −100 on the prefix, and `prefix_length` []
    is the part with bidirectional attention. Otherwise `input_ids` is the prefix and `labels` the rest, each
    ending with the end-of-sequence token. The rest is at most the share `longest_rest` of the text.
    """

    eos_token_id: int
    decoder_only: bool = False
    longest_rest: float = 1.0

    def __call__(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        if len(tokens) < 2:
            raise ValueError(f"a prefix and a rest need at least 2 tokens, not {len(tokens)}")
        border = int(generator.integers(len(tokens) - self._most_rest(len(tokens)), len(tokens)))
        tokens = tokens.astype(np.int64)
        if self.decoder_only:
            labels = tokens.copy()
            labels[:border] = IGNORED
            return {"input_ids": tokens, "labels": labels, "prefix_length": np.array(border, np.int64)}
        end = np.int64(self.eos_token_id)
        return {"input_ids": np.append(tokens[:border], end), "labels": np.append(tokens[border:], end)}

    def raw_length(self, input_length: int, target_length: int) -> int:
        """Returns the longest text whose parts, each with its end, always fit `input_length` and `target_length`."""
        # The prefix is at least one token shorter than the text, which leaves room for its end.
        fitting = (length for length in range(2, input_length + 1) if self._most_rest(length) < target_length)
        return max(fitting, default=1)

    def _most_rest(self, length: int) -> int:
        return min(max(1, int(self.longest_rest * length)), length - 1)


@objective("prefix-lm")
@dataclass(frozen=True)
class PrefixLMObjective(Seq2SeqObjective):
    """Predicts the end of a text from its beginning. It has no settings."""

    def build(
        self,
        indexed: IndexedDataset,
        tokenizer: Tokenizer,
        sequence_length: int,
        target_length: int | None = None,
        seed: int = 1234,
    ) -> ObjectiveDataset:
        prefix_lm = PrefixLM(tokenizer.eos_token_id)
        length = prefix_lm.raw_length(*self.lengths(sequence_length, target_length))
        return ObjectiveDataset(indexed, length, prefix_lm, seed=seed)
