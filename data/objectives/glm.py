"""Makes GLM's mixture of blank-infilling samples from windows of documents, or from several short
documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..text.sentences import sentence_end_ids
from ..tokenizers.glm_tokens import DEFAULT_VOCABULARY, GLMVocabulary, glm_tokenizer
from ..tokenizers.tokenizer import Tokenizer
from .blank_infilling import BlankInfilling, Mode
from .objective import Format, Objective, PretrainingData

SHORTEST_PIECE = 32
SHORTEST_TEXT = 2 * SHORTEST_PIECE


@dataclass(frozen=True)
class GLMMixture:
    """Shares of the modes.

    Published mixtures (token/sentence/document): GLM-10B .5/.3/.2 at 512 tokens, and .4/.3/.3 at
    1024 tokens with single spans .05 and short texts .5; Large-Chinese .4/.3/.3.

    Args:
        token: Share of the token mode.
        sentence: Share of the sentence mode; the document mode has the rest.
        single_span: Share of samples with a single span, which have no other mode.
        short: Share of samples with a shortened text.
    """

    token: float = 0.5
    sentence: float = 0.3
    single_span: float = 0.0
    short: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.token, self.sentence, self.single_span, self.short)
        if min(shares) < 0 or max(shares) > 1 or self.token + self.sentence > 1:
            raise ValueError(
                f"all shares of {self} must be between 0 and 1, and token + sentence at most 1"
            )


class GLMDataset:
    """Endless samples for blank infilling; sample i depends on (corpus, settings, seed, i) alone.

    A document is chosen with probability proportional to its length. A long document gives a window
    that begins after a sentence (or anywhere, with probability `anywhere`) and ends with a sentence
    if at least half of the window remains. Short documents are joined, each with its own [CLS],
    until `length` is full. Documents must end with GLM's eos, or with [SEP], as those prepared with
    BERT's vocabulary; GLM's eos then takes its place.

    Args:
        length: Maximum number of tokens of a text, before blanks are made.
        mode_block: Number of consecutive samples with the same mode. The published code has batches
            of one mode; for these, set it to the batch size.
        anywhere: Probability of a window that need not begin after a sentence.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        length: int,
        infilling: BlankInfilling,
        mixture: GLMMixture | None = None,
        *,
        seed: int = 1234,
        mode_block: int = 1,
        anywhere: float = 0.0,
    ) -> None:
        if length < SHORTEST_TEXT:
            raise ValueError(
                f"GLM texts of {length} tokens are too short; use at least {SHORTEST_TEXT}"
            )
        if indexed.num_tokens == 0:
            raise ValueError(f"{indexed.prefix} holds no tokens")
        if mode_block < 1:
            raise ValueError(f"mode_block is {mode_block}; it must be at least 1")
        self.indexed = indexed
        self.length = length
        self.infilling = infilling
        self.mixture = mixture or GLMMixture()
        self.seed = seed
        self.mode_block = mode_block
        self.anywhere = anywhere
        if self.mixture.sentence > 0 and infilling.sentence_ends is None:
            raise ValueError("the sentence mode needs sentence_ends; see sentence_end_ids")
        self._ends = np.cumsum(indexed.document_lengths())

    @property
    def samples_per_epoch(self) -> float:
        """Samples whose texts have as many tokens as the corpus.

        Texts are drawn, so some are not in them.
        """
        return self.tokens_per_epoch / self.length

    @property
    def tokens_per_epoch(self) -> int:
        return self.indexed.num_tokens

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        mode, is_short = self._draw_mode(index // self.mode_block)
        generator = np.random.default_rng([self.seed, 1, index])
        text = self.draw_text(generator)
        if is_short:
            text = self._shorten(text, generator)
        if mode == "single_span":
            return self.infilling.single_span(text, generator)
        return self.infilling(text, mode, generator)

    def draw_text(self, generator: np.random.Generator) -> np.ndarray:
        """Returns a random text of at most `length` tokens that begins with [CLS]: int64."""
        document = self._draw_document(generator)
        if len(document) > self.length - 1:
            return self._draw_window(document, generator)
        parts = [self._with_cls(document)]
        filled = len(parts[0])
        while filled < self.length - 2:  # There is room for a [CLS] and a token.
            part = self._with_cls(self._draw_document(generator))[: self.length - filled]
            parts.append(part)
            filled += len(part)
        return np.concatenate(parts)

    def _draw_mode(self, block: int) -> tuple[Mode | Literal["single_span"], bool]:
        """Returns the mode of a block of samples, and whether their texts are shortened."""
        generator = np.random.default_rng([self.seed, 0, block])
        single_draw, mode_draw, short_draw = generator.random(3)
        is_short = bool(short_draw < self.mixture.short)
        if single_draw < self.mixture.single_span:
            return "single_span", is_short
        if mode_draw < self.mixture.token:
            return "token", is_short
        if mode_draw < self.mixture.token + self.mixture.sentence:
            return "sentence", is_short
        return "document", is_short

    def _draw_document(self, generator: np.random.Generator) -> np.ndarray:
        while True:
            # The document of a uniformly random token.
            token = generator.integers(self.indexed.num_tokens)
            number = int(np.searchsorted(self._ends, token, side="right"))
            document = self.indexed.document(number)
            # An empty document has its end only. It is skipped, unless all documents are empty.
            if len(document) > 1 or self.indexed.num_tokens == self.indexed.num_documents:
                document = document.astype(np.int64)
                special = self.infilling.tokens
                if document[-1] == special.sep:
                    document[-1] = special.eos
                return document

    def _with_cls(self, document: np.ndarray) -> np.ndarray:
        return np.concatenate([[self.infilling.tokens.cls], document])

    def _draw_window(self, document: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        size = self.length - 1
        start = int(generator.integers(0, len(document) - size + 1))
        ends = self.infilling.sentence_ends
        if ends is None:
            return self._with_cls(document[start : start + size])
        if generator.random() >= self.anywhere:
            is_leftwards = bool(generator.random() < 0.5)
            start = self._slide(document, start, ends, leftwards=is_leftwards)
        window = document[start : start + size]
        last = np.flatnonzero(ends[window] | (window == self.infilling.tokens.eos))
        if len(last) and last[-1] + 1 >= size // 2:
            window = window[: last[-1] + 1]
        return self._with_cls(window)

    def _slide(self, document: np.ndarray, start: int, ends: np.ndarray, *, leftwards: bool) -> int:
        """Returns the nearest position after a sentence on one side, at most half a window away;
        otherwise `start`.
        """
        reach = self.length // 2
        if leftwards:
            leftmost = max(0, start - reach)
            before = np.flatnonzero(ends[document[leftmost:start]])
            if len(before):
                return leftmost + int(before[-1]) + 1
            return start if start > reach else 0
        behind = np.flatnonzero(ends[document[start : start + reach]])
        if len(behind) and start + behind[0] + 1 < len(document) - SHORTEST_PIECE:
            return start + int(behind[0]) + 1
        return start

    def _shorten(self, text: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the beginning of a text, of random length from 32 up, cut after a sentence if
        half of it remains.
        """
        target = int(generator.integers(SHORTEST_PIECE, self.length - 1))
        piece = text[:target]
        ends = self.infilling.sentence_ends
        if ends is None:
            return piece
        sentence_ends = np.flatnonzero(ends[piece])
        if len(sentence_ends) and sentence_ends[-1] >= target // 2:
            piece = piece[: sentence_ends[-1] + 1]
        return piece


@dataclass(frozen=True)
class GLMObjective(GLMMixture, Objective):
    """Predicts the contents of blanks, in a mixture of modes.

    Args:
        vocabulary: The base vocabulary, which determines GLM's special tokens.
        mask_probability: Share of a text that is blanked in the token and sentence modes.
        block_mask_probability: Share of the generated inputs that are hidden by [dBLOCK].
    """

    name: ClassVar[str] = "glm"
    format: ClassVar[Format] = "blanks"
    shortest: ClassVar[int] = SHORTEST_TEXT

    vocabulary: GLMVocabulary = DEFAULT_VOCABULARY
    mask_probability: float = 0.15
    block_mask_probability: float = 0.0

    def __post_init__(self) -> None:
        GLMMixture.__post_init__(self)
        Objective.__post_init__(self)

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        try:
            glm_tokenizer(tokenizer, self.vocabulary)
        except ValueError as error:
            raise ValueError(
                f"objective {self.name!r} has vocabulary={self.vocabulary!r}, but {error}"
            ) from None

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        # A span adds a mask and a start or end, and has at least one blanked token.
        length = sequence_length + 2 * (int(self.mask_probability * sequence_length) + 1)
        return length, length

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> GLMDataset:
        infilling = BlankInfilling(
            glm_tokenizer(tokenizer, self.vocabulary),
            self.mask_probability,
            self.block_mask_probability,
            sentence_ends=sentence_end_ids(tokenizer),
        )
        return GLMDataset(indexed, data.sequence_length, infilling, self, seed=data.seed)
