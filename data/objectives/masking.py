"""Masks tokens for masked language modeling: BERT's and RoBERTa's 80/10/10, whole-word and n-gram
masking.

Devlin et al., "BERT", 2019, section 3.1; n-grams with probability 1/n as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..labels import IGNORED
from ..tokenizers.tokenizer import Tokenizer
from .objective import Objective


@dataclass(frozen=True)
class Masking:
    """Chooses `probability` of the maskable tokens: 80 % become the mask, 10 % a random token, 10 %
    are unchanged.

    `masking(tokens [n], generator)` returns `input_ids` and `labels` (−100 at positions that are
    not chosen), int64 [n]. The number of chosen tokens is exact: round(probability × maskable), at
    least 1; with words or n-grams, as many as fit that number.

    Args:
        mask_token_id: Id of the mask token.
        vocab_size: Random tokens are drawn uniformly from all ids below it that are not special.
        special_ids: Ids that are never masked and never drawn as random tokens.
        probability: Share of maskable tokens that is chosen.
        continues: bool [vocab_size], whether a token continues the word before it (see
            `find_continuations`); words are then chosen whole. None: every token is a word.
        longest_ngram: Words that are chosen together, n with probability proportional to 1/n.
    """

    mask_token_id: int
    vocab_size: int
    special_ids: tuple[int, ...] = ()
    probability: float = 0.15
    continues: np.ndarray | None = None
    longest_ngram: int = 1
    _drawable: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(
                f"the masking probability is {self.probability}; "
                "it must be more than 0 and less than 1"
            )
        if self.longest_ngram < 1:
            raise ValueError(f"longest_ngram is {self.longest_ngram}; it must be at least 1")
        drawable = np.setdiff1d(np.arange(self.vocab_size), [*self.special_ids, self.mask_token_id])
        if len(drawable) == 0:
            raise ValueError(f"a vocabulary of {self.vocab_size} has no token that is not special")
        object.__setattr__(self, "_drawable", drawable)

    def __call__(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = tokens.astype(np.int64)
        chosen = self.choose(tokens, generator)  # [chosen]
        labels = np.full_like(tokens, IGNORED)
        labels[chosen] = tokens[chosen]
        fate = generator.random(len(chosen))
        inputs = tokens.copy()
        inputs[chosen[fate < 0.8]] = self.mask_token_id
        swapped = chosen[(fate >= 0.8) & (fate < 0.9)]
        inputs[swapped] = generator.choice(self._drawable, len(swapped))
        return {"input_ids": inputs, "labels": labels}

    def choose(self, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the positions to predict, sorted: int64 [chosen]."""
        is_special = np.isin(tokens, np.array([*self.special_ids, self.mask_token_id]))
        maskable = np.flatnonzero(~is_special)
        if len(maskable) == 0:
            return np.empty(0, np.int64)
        budget = max(1, round(self.probability * len(maskable)))
        if self.continues is None and self.longest_ngram == 1:
            return np.sort(generator.choice(maskable, budget, replace=False))
        return self._choose_words(tokens, maskable, budget, generator)

    def _choose_words(
        self, tokens: np.ndarray, maskable: np.ndarray, budget: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Chooses whole words, or runs of words, with at most `budget` tokens together."""
        begins_word = np.ones(len(maskable), bool)
        if self.continues is not None:
            # A special token between two pieces ends the word.
            is_neighbor = np.diff(maskable, prepend=-2) == 1
            begins_word = ~(self.continues[tokens[maskable]] & is_neighbor)
        borders = np.append(np.flatnonzero(begins_word), len(maskable))  # [words + 1]
        words = len(borders) - 1
        sizes = np.arange(1, self.longest_ngram + 1)
        weights = 1 / sizes
        ngrams = generator.choice(sizes, words, p=weights / weights.sum())  # [words]
        taken = np.zeros(words, bool)
        left = budget
        for word in generator.permutation(words):
            # The run from this word is as long as its n, the free words and the budget allow.
            longest = min(words, word + ngrams[word])
            stop = word
            while stop < longest and not taken[stop]:
                if borders[stop + 1] - borders[word] > left:
                    break
                stop += 1
            taken[word:stop] = True
            left -= int(borders[stop] - borders[word])
            if left == 0:
                break
        if not taken.any():  # Every word is longer than the budget.
            taken[generator.integers(words)] = True
        return maskable[np.repeat(taken, np.diff(borders))]


def find_continuations(tokens: list[str]) -> np.ndarray:
    """Returns bool [V]: which tokens of a vocabulary continue the word before them.

    WordPiece marks continuations ("##ing"); SentencePiece and byte-level BPE mark beginnings of
    words ("▁the", "Ġthe").
    """
    if any(token.startswith("##") for token in tokens):
        return np.array([token.startswith("##") for token in tokens])
    begins = ("▁", "Ġ", "Ċ", "ĉ", "<")
    return np.array([not token.startswith(begins) for token in tokens])


@dataclass(frozen=True)
class MaskedObjective(Objective):
    """Predicts masked tokens.

    Args:
        mask_probability: Share of tokens that is masked.
        whole_words: Mask whole words.
        longest_ngram: Mask up to this many words at once.
    """

    needs: ClassVar[tuple[str, ...]] = ("cls_token", "sep_token", "mask_token")
    tokenizers: ClassVar[str] = (
        "BERT's or RoBERTa's, or train one: "
        "shardzoo data train-tokenizer --kind wordpiece or roberta-bpe"
    )

    mask_probability: float = 0.15
    whole_words: bool = False
    longest_ngram: int = 1

    def masking(self, tokenizer: Tokenizer) -> Masking:
        """Returns a `Masking` with a tokenizer's mask and special tokens."""
        continues = None
        if self.whole_words and tokenizer.vocab_size:
            tokens = tokenizer.tokens(tokenizer.vocab_size)
            continues = find_continuations([token or "" for token in tokens])
        return Masking(
            tokenizer.special_id("mask_token"),
            tokenizer.vocab_size,
            tuple(sorted(set(tokenizer.special.values()))),
            self.mask_probability,
            continues,
            self.longest_ngram,
        )
