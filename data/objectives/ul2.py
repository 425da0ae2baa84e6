"""Makes samples of UL2's mixture of denoisers: span corruption of several kinds, and prefix
language modeling.

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

# The tokens of the modes, as in the published google/ul2.
REGULAR = "[NLU]"
EXTREME = "[NLG]"
SEQUENTIAL = "[S2S]"
MODE_TOKENS = (REGULAR, EXTREME, SEQUENTIAL)
# (corrupted share, mean span length) of each denoiser.
REGULAR_SPANS = ((0.15, 3.0), (0.15, 8.0))
EXTREME_SPANS = ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
LONGEST_REST = 0.5  # sequential: the rest is uniform up to half of the text, a quarter on average


@dataclass(frozen=True)
class MixtureOfDenoisers:
    """Makes each sample by one of several denoisers, and puts the token of its mode in front of the
    input.

    Args:
        shares: Probability of each denoiser; their sum is 1.
        modes: Id of each denoiser's mode token.
        denoisers: Make `input_ids` and `labels` from (tokens, generator).
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
    """Predicts corrupted spans or the end of a text, in a mixture of seven denoisers, by default
    with equal shares.

    All samples are made of texts of one length, the longest that fits the input and target of every
    denoiser. It is also limited by the number of sentinels, of which the densest denoiser needs one
    for six tokens.

    Args:
        regular: Share of the two regular denoisers (R: spans of 3 and 8 tokens, 15 %).
        extreme: Share of the four extreme denoisers (X: 3 and 8 tokens at 50 %, 64 tokens at 15 %
            and 50 %); the sequential denoiser (S: prefix language modeling) has the rest.
    """

    name: ClassVar[str] = "ul2"
    shortest: ClassVar[int] = 4  # a mode token before the shortest input of span corruption

    regular: float = 2 / 7
    extreme: float = 4 / 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.regular, self.extreme) < 0 or self.regular + self.extreme > 1:
            raise ValueError(
                f"regular is {self.regular} and extreme {self.extreme}; "
                "shares must not be negative, and their sum at most 1"
            )

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        super().add_special_tokens(tokenizer)
        add_sentinels(tokenizer)
        tokenizer.add_tokens(MODE_TOKENS)

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> ObjectiveDataset:
        input_length, target_length = self.lengths(data.sequence_length, data.target_length)
        sentinels = sentinel_ids(tokenizer)
        end = tokenizer.eos_token_id
        corruptions = [
            SpanCorruption(sentinels, end, density, mean_length)
            for density, mean_length in (*REGULAR_SPANS, *EXTREME_SPANS)
        ]
        denoisers = (*corruptions, PrefixLM(end, longest_rest=LONGEST_REST))
        text_length = input_length - 1  # The mode token takes one place of the input.
        length = min(denoiser.raw_length(text_length, target_length) for denoiser in denoisers)
        mixture = MixtureOfDenoisers(
            self._compute_shares(), _find_mode_ids(tokenizer), tuple(denoisers)
        )
        return ObjectiveDataset(indexed, length, mixture, seed=data.seed)

    def _compute_shares(self) -> tuple[float, ...]:
        """Returns the share of each denoiser: regular, extreme, sequential."""
        regular = [self.regular / len(REGULAR_SPANS)] * len(REGULAR_SPANS)
        extreme = [self.extreme / len(EXTREME_SPANS)] * len(EXTREME_SPANS)
        sequential = max(0.0, 1 - sum((*regular, *extreme)))
        return (*regular, *extreme, sequential)


def _find_mode_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the id of each denoiser's mode token."""
    ids: dict[str, int] = {}
    for mode in MODE_TOKENS:
        index = tokenizer.token_to_id(mode)
        if index is None:
            raise ValueError(
                f"this tokenizer lacks a token of {', '.join(MODE_TOKENS)}; call add_special_tokens"
            )
        ids[mode] = index
    regular = [ids[REGULAR]] * len(REGULAR_SPANS)
    extreme = [ids[EXTREME]] * len(EXTREME_SPANS)
    return (*regular, *extreme, ids[SEQUENTIAL])
