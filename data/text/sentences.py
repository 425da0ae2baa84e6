"""Sentence ends, in text and in token vocabularies."""

from __future__ import annotations

import re

import numpy as np

from ..tokenizers.tokenizer import Tokenizer

# Latin marks count before white space only ("3.14" is no end); the full-width ones have no space behind them.
_BOUNDARY = re.compile(
    r"(?<=[.?!])(?=\s)|(?<=[.?!][\"'”’)])(?=\s)"
    r"|(?<=[。？！…])(?![。？！…”’」』）])|(?<=[。？！…][”’」』）])(?![。？！…”’」』）])"
    r"|(?<=\n)(?=[^\n])"
)
# The marks behind which GLM's sampling may cut (specification of its BlockDataset and
# ConstructBlockStrategy).
DOCUMENT_CUT_MARKS = frozenset(".?!;:\n")
SENTENCE_MARKS = DOCUMENT_CUT_MARKS | frozenset("。？！；…")


def split_sentences(text: str) -> list[str]:
    """Sentences of a text; joined they are the text again. White space goes to the sentence behind it.

    A rule, not a model: it ends sentences at . ? ! before white space, at 。？！… and at line ends.
    """
    parts = [part for part in _BOUNDARY.split(text) if part]
    merged: list[str] = []
    for part in parts:
        if merged and (part.isspace() or merged[-1].isspace()):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def sentence_end_ids(tokenizer: Tokenizer, marks: frozenset[str] = SENTENCE_MARKS) -> np.ndarray:
    """bool [V]: whether a token is one of the marks, apart from the vocabulary's own signs for spaces."""
    ends = np.zeros(tokenizer.vocab_size, bool)
    for index in range(tokenizer.vocab_size):
        try:
            token = tokenizer.id_to_token(index)
        except ValueError:  # vocabularies may have holes
            continue
        bare = token.replace("Ċ", "\n").lstrip("Ġ▁ ").removeprefix("##")
        ends[index] = bare in marks or token == "<0x0A>"
    return ends
