"""Makes samples of UL2's mixture of denoisers: span corruption of several kinds, and prefix language modeling.

Tay et al., "UL2: Unifying language learning paradigms", 2022, section 3.1 and table 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..tokenizers.sentinels import add_sentinels, sentinel_ids
from ..tokenizers.tokenizer import Tokenizer
from .denoising import PrefixLM, SpanCorruption
from .objective import PretrainingData, Seq2SeqObjective
from .packed import ObjectiveDataset, Transform

REGULAR, EXTREME, SEQUENTIAL = MODE_TOKENS = (
    "[NLU]",
    "[NLG]",
    "[S2S]",
)  # as in the published google/ul2
# (corrupted share, mean span length) of each denoiser.
REGULAR_SPANS = ((0.15, 3.0), (0.15, 8.0))
EXTREME_SPANS = ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
LONGEST_REST = 0.5  # sequential: the rest is uniform up to half of the text, a quarter on average


@dataclass(frozen=True)
class MixtureOfDenoisers:
    """Makes each sample by one of several denoisers, and puts the token of its mode in front of the input.

    Args:
        shares: probability of each denoiser; their sum is 1.
        modes: id of each denoiser's mode token.
        denoisers: make `input_ids` and `labels` from (tokens, generator).
    """

    shares: tuple[float, ...]
    modes: tuple[int, ...]
    denoisers: tuple[Transform, ...]

    def __call__(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        chosen = int(generator.choice(len(self.shares), p=self.shares))
        sample = self.denoisers[chosen](tokens, generator)
        return {**sample, "input_ids": np.concatenate([[self.modes[chosen]], sample["input_ids"]])}


@dataclass(frozen=True)
class UL2Objective(Seq2SeqObjective):
    """Predicts corrupted spans or the end of a text, in a mixture of seven denoisers, by default with equal shares.

    All samples are made of texts of one length, the longest that fits the input and target of every denoiser. It is
    also limited by the number of sentinels, of which the densest denoiser needs one for six tokens.

    Args:
        regular: share of the two regular denoisers (R: spans of 3 and 8 tokens, 15 %).
        extreme: share of the four extreme denoisers (X: 3 and 8 tokens at 50 %, 64 tokens at 15 % and 50 %); the
            sequential denoiser (S: prefix language modeling) has the rest.
    """

    name: ClassVar[str] = "ul2"
    shortest: ClassVar[int] = 4  # a mode token before the shortest input of span corruption

    regular: float = 2 / 7
    extreme: float = 4 / 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.regular, self.extreme) < 0 or self.regular + self.extreme > 1:
            raise ValueError(
                f"regular is {self.regular} and extreme {self.extreme}; shares must not be negative, and their sum at "
                "most 1"
            )

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        super().add_special_tokens(tokenizer)
        add_sentinels(tokenizer)
        tokenizer.add_tokens(MODE_TOKENS)

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> ObjectiveDataset:
        source, target = self.lengths(data.sequence_length, data.target_length)
        sentinels, end = sentinel_ids(tokenizer), tokenizer.eos_token_id
        corruptions = tuple(
            SpanCorruption(sentinels, end, *spans) for spans in (*REGULAR_SPANS, *EXTREME_SPANS)
        )
        denoisers = (*corruptions, PrefixLM(end, longest_rest=LONGEST_REST))
        length = min(
            denoiser.raw_length(source - 1, target) for denoiser in denoisers
        )  # 1 is the mode token
        mixture = MixtureOfDenoisers(self._shares(), _mode_ids(tokenizer), denoisers)
        return ObjectiveDataset(indexed, length, mixture, seed=data.seed)

    def _shares(self) -> tuple[float, ...]:
        """Returns the share of each denoiser: regular, extreme, sequential."""
        regular, extreme = self.regular / len(REGULAR_SPANS), self.extreme / len(EXTREME_SPANS)
        spans = (*[regular] * len(REGULAR_SPANS), *[extreme] * len(EXTREME_SPANS))
        return (*spans, max(0.0, 1 - sum(spans)))


def _mode_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the id of each denoiser's mode token."""
    ids = {mode: tokenizer.token_to_id(mode) for mode in MODE_TOKENS}
    if None in ids.values():
        raise ValueError(
            f"this tokenizer lacks a token of {', '.join(MODE_TOKENS)}; call add_special_tokens"
        )
    modes = (*[REGULAR] * len(REGULAR_SPANS), *[EXTREME] * len(EXTREME_SPANS), SEQUENTIAL)
    return tuple(index for mode in modes if (index := ids[mode]) is not None)
