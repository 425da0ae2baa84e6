"""Makes GLM samples: spans of a text become blanks and are generated one after another, with two-dimensional positions.

Du et al., "GLM: General language model pretraining with autoregressive blank infilling", 2022, section 2.1.
The rules for choosing spans are those of the published code's ConstructBlockStrategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..tokenizers.glm_tokens import GLMTokens
from .labels import IGNORED

Mode = Literal["token", "sentence", "document"]


@dataclass(frozen=True)
class BlankInfilling:
    """Turns a text [n] that begins with [CLS] into part A, with blanks, and part B, the contents of the blanks.

    `infill(tokens, mode, generator)` returns int64 arrays, with s the length of A and B together: `input_ids` [s];
    `position_ids` [2, s] (position in A, position in the span); `labels` [s], −100 on A, not shifted;
    `attention_mask` [], the length of A. A attends to all of A; B attends to A and causally to B.

    Args:
        tokens: ids of the special tokens.
        ratio: share of a text that is blanked in the token and sentence modes.
        block_mask_probability: share of B's inputs that are replaced by dBLOCK in the token mode.
        least_generated: lower bound of the share of a text that the document mode generates.
        infill_probability: share of document samples with the blank in the middle rather than at the end.
        task_masks: whether sentence and document blanks have their own mask tokens (sMASK, gMASK).
        sentence_ends: bool [V], needed by the sentence mode (see `sentence_end_ids`).
        shuffle: whether the spans of B are in random order.
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
        spans = self.choose_sentences(tokens, generator) if mode == "sentence" else None
        mask = self.tokens.smask if self.task_masks else self.tokens.mask
        if not spans:  # a text of one sentence has no blank in sentence mode
            spans, mask = self.choose_tokens(tokens, generator), self.tokens.mask
        order = generator.permutation(len(spans)) if self.shuffle else np.arange(len(spans))
        hide = self.block_mask_probability if mode == "token" else 0.0
        return self.build(tokens, spans, order, mask, generator if hide > 0 else None)

    def single_span(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Makes a sample with one blank of a token-mode length (the published code's single-span mixture)."""
        room = max(length for _, length in documents_of(tokens, self.tokens))
        length = min(int(span_lengths(1, generator)[0]), room)
        spans = place_spans(tokens, [length], self.tokens, self.ratio, generator)
        return self.build(tokens, spans, np.arange(1), self.tokens.mask)

    def choose_tokens(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Returns spans [start, stop) of Poisson(3) lengths that cover `ratio` of the text, in text order."""
        wanted = max(1, int(self.ratio * len(tokens)))
        lengths = span_lengths(wanted, generator)
        while lengths:
            if spans := place_spans(tokens, lengths, self.tokens, self.ratio, generator):
                return spans
            # The reference drops a text that cannot hold all spans; here the longest span is shortened.
            longest = lengths.index(max(lengths))
            lengths[longest] -= 1
            lengths = [length for length in lengths if length]
        raise ValueError(
            "blank infilling needs a text with a token that is neither [CLS] nor the end"
        )

    def choose_sentences(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Chooses sentences at random until `ratio` of the text is covered; returns them in text order."""
        if self.sentence_ends is None:
            raise ValueError("the sentence mode needs sentence_ends; see sentence_end_ids")
        sentences = sentences_of(tokens, self.sentence_ends, self.tokens)
        chosen: list[tuple[int, int]] = []
        covered, wanted = 0, int(self.ratio * len(tokens))
        for number in generator.permutation(len(sentences)):
            start, stop = sentences[number]
            chosen.append((start, stop))
            covered += stop - start
            if covered >= wanted:
                break
        return sorted(chosen)

    def document(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Makes a sample with one long blank, at the end if the text has several documents, else possibly inside."""
        length = len(tokens)
        least = int(self.least_generated * length)
        longest = int(generator.integers(least, max(length - 1, least + 1)))
        generated = max(1, min(longest, length - 2))
        several = int((tokens[:-1] == self.tokens.eos).sum()) > 0
        if several or generator.random() < 1 - self.infill_probability:
            return self.suffix(tokens, generated)
        span = place_spans(tokens, [generated], self.tokens, self.ratio, generator)
        mask = self.tokens.gmask if self.task_masks else self.tokens.mask
        return self.build(tokens, span, np.arange(1), mask)

    def suffix(self, tokens: np.ndarray, generated: int) -> dict[str, np.ndarray]:
        """Makes a sample that generates the last `generated` tokens, which end without an end-of-piece token."""
        mask = self.tokens.gmask if self.task_masks else self.tokens.mask
        border = len(tokens) - generated
        inputs = np.concatenate(
            [tokens[:border], [mask, self.tokens.sop], tokens[border:-1]]
        ).astype(np.int64)
        labels = np.full(len(inputs), IGNORED, np.int64)
        labels[border + 1 :] = tokens[border:]
        place = np.concatenate([np.arange(border + 1), np.full(generated, border)])
        inside = np.concatenate([np.zeros(border + 1, np.int64), np.arange(1, generated + 1)])
        return _sample(inputs, labels, place, inside, border + 1)

    def build(
        self,
        tokens: np.ndarray,
        spans: list[tuple[int, int]],
        order: np.ndarray,
        mask: int,
        generator: np.random.Generator | None = None,
    ) -> dict[str, np.ndarray]:
        """Makes the sample of given spans [start, stop) in text order, which part B has in the given order.

        With a generator, B's inputs are replaced by dBLOCK with `block_mask_probability`.
        """
        parts: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        places: list[np.ndarray] = []
        insides: list[np.ndarray] = []
        before, masks_at = 0, []
        for start, stop in spans:
            parts += [tokens[before:start], np.array([mask])]
            masks_at.append(sum(map(len, parts)) - 1)
            before = stop
        parts.append(tokens[before:])
        length_a = sum(map(len, parts))
        places.append(np.arange(length_a))
        insides.append(np.zeros(length_a, np.int64))
        targets.append(np.full(length_a, IGNORED))
        for number in order:
            start, stop = spans[number]
            content = tokens[start:stop]
            shown = content.copy()
            if generator is not None:
                shown[generator.random(len(shown)) < self.block_mask_probability] = (
                    self.tokens.dblock
                )
            parts += [np.array([self.tokens.sop]), shown]
            targets += [content, np.array([self.tokens.eop])]
            places.append(np.full(stop - start + 1, masks_at[number]))
            insides.append(np.arange(1, stop - start + 2))
        join = np.concatenate
        return _sample(join(parts), join(targets), join(places), join(insides), length_a)


def _sample(
    inputs: np.ndarray, labels: np.ndarray, place: np.ndarray, inside: np.ndarray, length_a: int
) -> dict[str, np.ndarray]:
    return {
        "input_ids": inputs.astype(np.int64),
        "labels": labels.astype(np.int64),
        "position_ids": np.stack([place, inside]).astype(np.int64),
        "attention_mask": np.array(length_a, np.int64),
    }


LONGEST_SPAN = 39
MEAN_SPAN = 3.0


def _cumulative_weights() -> np.ndarray:
    lengths = np.arange(1, LONGEST_SPAN + 1)
    weights = np.exp(
        lengths * np.log(MEAN_SPAN) - np.cumsum(np.log(lengths))
    )  # Poisson, up to a constant
    cumulative = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0
    return cumulative


_CUMULATIVE = _cumulative_weights()


def span_lengths(least: int, generator: np.random.Generator) -> list[int]:
    """Draws Poisson(3) lengths, truncated to 1..39, until they sum to `least` or more."""
    drawn = (
        np.searchsorted(_CUMULATIVE, generator.random(least), side="right") + 1
    )  # more than enough
    return drawn[: int(np.searchsorted(np.cumsum(drawn), least)) + 1].tolist()


def documents_of(tokens: np.ndarray, ids: GLMTokens) -> list[tuple[int, int]]:
    """Returns (offset, length) of the documents in a text, shortest first.

    Documents are delimited by eos. A [CLS] before a document and the last token of the text are not part of it.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for end in [*np.flatnonzero(tokens == ids.eos).tolist(), len(tokens)]:
        offset = start + 1 if start < len(tokens) and tokens[start] == ids.cls else start
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

    The shorter documents of a text take spans up to `ratio` of their length; the longest document takes the rest.

    Returns:
        Spans [start, stop) in text order; [] if they do not all fit.
    """
    waiting = [lengths[place] for place in generator.permutation(len(lengths))]
    documents = documents_of(tokens, ids)
    spans: list[tuple[int, int]] = []
    for number, (offset, length) in enumerate(documents):
        last = number == len(documents) - 1
        here: list[int] = []
        while waiting:
            total = sum(here) + waiting[0]
            if total + len(here) > length if last else total > int(length * ratio):
                break
            here.append(waiting.pop(0))
        places = np.sort(generator.integers(0, length - sum(here) - len(here) + 2, len(here)))
        for place, span in zip(places.tolist(), here, strict=True):
            spans.append((offset + place, offset + place + span))
            offset += span + 1
    return [] if waiting else sorted(spans)


def sentences_of(
    tokens: np.ndarray, sentence_ends: np.ndarray, ids: GLMTokens
) -> list[tuple[int, int]]:
    """Returns the sentences [start, stop) of a text. An unfinished sentence before an eos is left out."""
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
