"""Makes GLM samples: spans of a text become blanks and are generated one after another, with
two-dimensional positions.

Du et al., "GLM: General language model pretraining with autoregressive blank infilling", 2022,
section 2.1. The rules for choosing spans are those of the published code's ConstructBlockStrategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..labels import IGNORED
from ..tokenizers.glm_tokens import GLMTokens

Mode = Literal["token", "sentence", "document"]


@dataclass(frozen=True)
class BlankInfilling:
    """Turns a text [n] that begins with [CLS] into part A, with blanks, and part B, the contents of
    the blanks.

    `infill(tokens, mode, generator)` returns int64 arrays, with s the length of A and B together:
    `input_ids` [s]; `position_ids` [2, s] (position in A, position in the span); `labels` [s], −100
    on A, not shifted; `attention_mask` [], the length of A. A attends to all of A; B attends to A
    and causally to B.

    Args:
        tokens: Ids of the special tokens.
        ratio: Share of a text that is blanked in the token and sentence modes.
        block_mask_probability: Share of B's inputs that are replaced by dBLOCK in the token mode.
        least_generated: Lower bound of the share of a text that the document mode generates.
        infill_probability: Share of document samples with the blank in the middle rather than at
            the end.
        task_masks: Whether sentence and document blanks have their own mask tokens (sMASK, gMASK).
        sentence_ends: bool [V], needed by the sentence mode (see `sentence_end_ids`).
        shuffle: Whether the spans of B are in random order.
    """

    tokens: GLMTokens
    ratio: float = 0.15
    block_mask_probability: float = 0.0
    least_generated: float = 0.5
    infill_probability: float = 0.5
    task_masks: bool = True
    sentence_ends: np.ndarray | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}; it must be more than 0 and less than 1")

    def __call__(
        self, tokens: np.ndarray, mode: Mode, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        if len(tokens) < 3:
            raise ValueError(
                f"blank infilling needs at least 3 tokens, including [CLS], not {len(tokens)}"
            )
        if mode == "document":
            return self.document(tokens, generator)
        spans: list[tuple[int, int]] = []
        mask = self.tokens.mask
        if mode == "sentence":
            spans = self.choose_sentences(tokens, generator)
            if spans and self.task_masks:
                mask = self.tokens.smask
        if not spans:
            # A text without a sentence to choose gets the blanks of the token mode.
            spans = self.choose_tokens(tokens, generator)
        order = np.arange(len(spans))
        if self.shuffle:
            order = generator.permutation(len(spans))
        hides_inputs = mode == "token" and self.block_mask_probability > 0
        return self.build(tokens, spans, order, mask, generator if hides_inputs else None)

    def single_span(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Makes a sample with one blank of a token-mode length (the published code's single-span
        mixture).
        """
        room = max(length for _, length in find_documents(tokens, self.tokens))
        length = min(draw_span_lengths(1, generator)[0], room)
        spans = place_spans(tokens, [length], self.tokens, self.ratio, generator)
        return self.build(tokens, spans, np.arange(1), self.tokens.mask)

    def choose_tokens(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Returns spans [start, stop) of Poisson(3) lengths that cover `ratio` of the text, in text
        order.
        """
        wanted = max(1, int(self.ratio * len(tokens)))
        lengths = draw_span_lengths(wanted, generator)
        while lengths:
            spans = place_spans(tokens, lengths, self.tokens, self.ratio, generator)
            if spans:
                return spans
            # The reference drops a text that cannot hold all spans. Here the longest one is
            # shortened.
            longest = lengths.index(max(lengths))
            lengths[longest] -= 1
            lengths = [length for length in lengths if length]
        raise ValueError(
            "blank infilling needs a text with a token that is neither [CLS] nor the end"
        )

    def choose_sentences(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Chooses sentences at random until `ratio` of the text is covered.

        The sentences [start, stop) are returned in text order.
        """
        if self.sentence_ends is None:
            raise ValueError("the sentence mode needs sentence_ends; see sentence_end_ids")
        sentences = find_sentences(tokens, self.sentence_ends, self.tokens)
        chosen: list[tuple[int, int]] = []
        covered = 0
        wanted = int(self.ratio * len(tokens))
        for number in generator.permutation(len(sentences)):
            start, stop = sentences[number]
            chosen.append((start, stop))
            covered += stop - start
            if covered >= wanted:
                break
        return sorted(chosen)

    def document(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Makes a sample with one long blank, at the end if the text has several documents, else
        possibly inside.
        """
        length = len(tokens)
        least = int(self.least_generated * length)
        longest = int(generator.integers(least, max(length - 1, least + 1)))
        generated = max(1, min(longest, length - 2))
        has_several_documents = bool((tokens[:-1] == self.tokens.eos).any())
        if has_several_documents or generator.random() < 1 - self.infill_probability:
            return self.suffix(tokens, generated)
        span = place_spans(tokens, [generated], self.tokens, self.ratio, generator)
        mask = self.tokens.gmask if self.task_masks else self.tokens.mask
        return self.build(tokens, span, np.arange(1), mask)

    def suffix(self, tokens: np.ndarray, generated: int) -> dict[str, np.ndarray]:
        """Makes a sample that generates the last `generated` tokens, which end without an
        end-of-piece token.
        """
        mask = self.tokens.gmask if self.task_masks else self.tokens.mask
        border = len(tokens) - generated
        inputs = np.concatenate([tokens[:border], [mask, self.tokens.sop], tokens[border:-1]])
        labels = np.full(len(inputs), IGNORED, np.int64)
        labels[border + 1 :] = tokens[border:]
        positions = np.concatenate([np.arange(border + 1), np.full(generated, border)])
        within = np.concatenate([np.zeros(border + 1, np.int64), np.arange(1, generated + 1)])
        return _build_sample(inputs, labels, positions, within, border + 1)

    def build(
        self,
        tokens: np.ndarray,
        spans: list[tuple[int, int]],
        order: np.ndarray,
        mask: int,
        generator: np.random.Generator | None = None,
    ) -> dict[str, np.ndarray]:
        """Makes the sample of given spans [start, stop) in text order, which part B has in the
        given order.

        With a generator, B's inputs are replaced by dBLOCK with `block_mask_probability`.
        """
        # Part A is the text with a mask in place of each span.
        inputs: list[np.ndarray] = []
        mask_positions: list[int] = []
        before = 0
        for start, stop in spans:
            inputs += [tokens[before:start], np.array([mask])]
            mask_positions.append(sum(map(len, inputs)) - 1)
            before = stop
        inputs.append(tokens[before:])
        length_a = sum(map(len, inputs))
        labels = [np.full(length_a, IGNORED)]
        positions = [np.arange(length_a)]
        within = [np.zeros(length_a, np.int64)]
        # Part B is the spans. All tokens of a span have the position of its mask, and count from 1
        # within the span.
        for number in order:
            start, stop = spans[number]
            content = tokens[start:stop]
            shown = content.copy()
            if generator is not None:
                is_hidden = generator.random(len(shown)) < self.block_mask_probability
                shown[is_hidden] = self.tokens.dblock
            inputs += [np.array([self.tokens.sop]), shown]
            labels += [content, np.array([self.tokens.eop])]
            positions.append(np.full(stop - start + 1, mask_positions[number]))
            within.append(np.arange(1, stop - start + 2))
        return _build_sample(
            np.concatenate(inputs),
            np.concatenate(labels),
            np.concatenate(positions),
            np.concatenate(within),
            length_a,
        )


def _build_sample(
    inputs: np.ndarray, labels: np.ndarray, positions: np.ndarray, within: np.ndarray, length_a: int
) -> dict[str, np.ndarray]:
    return {
        "input_ids": inputs.astype(np.int64),
        "labels": labels.astype(np.int64),
        "position_ids": np.stack([positions, within]).astype(np.int64),
        "attention_mask": np.array(length_a, np.int64),
    }


LONGEST_SPAN = 39
MEAN_SPAN = 3.0


def _compute_cumulative_weights() -> np.ndarray:
    """Returns the distribution function of a span's length: fp64 [LONGEST_SPAN]."""
    lengths = np.arange(1, LONGEST_SPAN + 1)
    log_factorials = np.cumsum(np.log(lengths))
    weights = np.exp(lengths * np.log(MEAN_SPAN) - log_factorials)  # Poisson, up to a constant
    cumulative = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0
    return cumulative


_CUMULATIVE = _compute_cumulative_weights()


def draw_span_lengths(least: int, generator: np.random.Generator) -> list[int]:
    """Draws Poisson(3) lengths, truncated to 1..39, until they sum to `least` or more."""
    # Each length is at least 1, so `least` of them are enough.
    drawn = np.searchsorted(_CUMULATIVE, generator.random(least), side="right") + 1
    count = int(np.searchsorted(np.cumsum(drawn), least)) + 1
    return drawn[:count].tolist()


def find_documents(tokens: np.ndarray, ids: GLMTokens) -> list[tuple[int, int]]:
    """Returns (offset, length) of the documents in a text, shortest first.

    Documents are delimited by eos. A [CLS] before a document and the last token of the text are not
    part of it.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for end in [*np.flatnonzero(tokens == ids.eos).tolist(), len(tokens)]:
        offset = start
        if start < len(tokens) and tokens[start] == ids.cls:
            offset += 1
        found.append((offset, max(0, min(end, len(tokens) - 1) - offset)))
        start = end + 1
    return sorted(found, key=lambda document: document[1])


def place_spans(
    tokens: np.ndarray,
    lengths: list[int],
    ids: GLMTokens,
    ratio: float,
    generator: np.random.Generator,
) -> list[tuple[int, int]]:
    """Places spans of the given lengths at random, at least one token apart.

    The shorter documents of a text take spans up to `ratio` of their length; the longest document
    takes the rest.

    Returns:
        Spans [start, stop) in text order; [] if they do not all fit.
    """
    waiting = [lengths[place] for place in generator.permutation(len(lengths))]
    documents = find_documents(tokens, ids)
    spans: list[tuple[int, int]] = []
    for number, (offset, length) in enumerate(documents):
        is_last = number == len(documents) - 1
        here: list[int] = []
        while waiting:
            total = sum(here) + waiting[0]
            if is_last:
                # Every span needs a token between it and the next one.
                is_full = total + len(here) > length
            else:
                is_full = total > int(length * ratio)
            if is_full:
                break
            here.append(waiting.pop(0))
        free = length - sum(here) - len(here) + 1
        places = np.sort(generator.integers(0, free + 1, len(here)))
        for place, span in zip(places.tolist(), here, strict=True):
            spans.append((offset + place, offset + place + span))
            offset += span + 1
    return [] if waiting else sorted(spans)


def find_sentences(
    tokens: np.ndarray, sentence_ends: np.ndarray, ids: GLMTokens
) -> list[tuple[int, int]]:
    """Returns the sentences [start, stop) of a text.

    An unfinished sentence before an eos is left out.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for place, token in enumerate(tokens.tolist()):
        if (token == ids.cls and place == start) or token == ids.eos:
            start = place + 1
        elif sentence_ends[token]:
            found.append((start, place + 1))
            start = place + 1
    if start < len(tokens):
        found.append((start, len(tokens)))
    return found
