"""Where GLM's blanks lie: lengths from a Poisson distribution, places at random within documents."""

from __future__ import annotations

import numpy as np

from ..tokenizers.glm_tokens import GLMTokens

LONGEST_SPAN = 39
MEAN_SPAN = 3.0


def _cumulative_weights() -> np.ndarray:
    lengths = np.arange(1, LONGEST_SPAN + 1)
    weights = np.exp(lengths * np.log(MEAN_SPAN) - np.cumsum(np.log(lengths)))  # Poisson, up to a constant
    cumulative = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0
    return cumulative


_CUMULATIVE = _cumulative_weights()


def span_lengths(least: int, generator: np.random.Generator) -> list[int]:
    """Poisson(3) lengths, cut to 1..39, until they sum to `least` or more."""
    drawn = np.searchsorted(_CUMULATIVE, generator.random(least), side="right") + 1  # more than enough
    return drawn[: int(np.searchsorted(np.cumsum(drawn), least)) + 1].tolist()


def documents_of(tokens: np.ndarray, ids: GLMTokens) -> list[tuple[int, int]]:
    """(offset, length) of the documents in a text, shortest first.

    Documents are delimited by eos; a [CLS] before one is no part of it, nor is the last token of the text.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for end in [*np.flatnonzero(tokens == ids.eos).tolist(), len(tokens)]:
        offset = start + 1 if start < len(tokens) and tokens[start] == ids.cls else start
        found.append((offset, max(0, min(end, len(tokens) - 1) - offset)))
        start = end + 1
    return sorted(found, key=lambda document: document[1])


def place_spans(
    tokens: np.ndarray, lengths: list[int], ids: GLMTokens, ratio: float, generator: np.random.Generator
) -> list[tuple[int, int]]:
    """Spans [start, stop) of the given lengths in text order, at least one token apart; [] if not all find
    room.

    The shorter documents of a text take spans up to `ratio` of their length, the longest takes the rest.
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


def sentences_of(tokens: np.ndarray, sentence_ends: np.ndarray, ids: GLMTokens) -> list[tuple[int, int]]:
    """Sentences [start, stop) of a text; what stands unfinished before an eos is none."""
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
