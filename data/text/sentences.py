"""Finds sentence ends in text and in token vocabularies."""

from __future__ import annotations

import re

import numpy as np

from ..tokenizers.tokenizer import Tokenizer

# Latin marks count only before white space ("3.14" has no end); full-width marks have no space
# after them.
_BOUNDARY = re.compile(
    r"(?<=[.?!])(?=\s)|(?<=[.?!][\"'”’)])(?=\s)"
    r"|(?<=[。？！…])(?![。？！…”’」』）])|(?<=[。？！…][”’」』）])(?![。？！…”’」』）])"
    r"|(?<=\n)(?=[^\n])"
)
# The marks after which GLM's sampling may cut (specification of its BlockDataset and
# ConstructBlockStrategy).
DOCUMENT_CUT_MARKS = frozenset(".?!;:\n")
SENTENCE_MARKS = DOCUMENT_CUT_MARKS | frozenset("。？！；…")


def split_sentences(text: str) -> list[str]:
    """Splits a text into sentences whose concatenation is the text.

    White space belongs to the sentence after it.

    Sentences end at . ? ! before white space, at 。？！… and at line ends; no model is used.
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
    """Returns bool [V]: whether a token is one of the marks, ignoring the vocabulary's symbols for
    spaces.
    """
    ends = np.zeros(tokenizer.vocab_size, bool)
    for index, token in enumerate(tokenizer.tokens(tokenizer.vocab_size)):
        bare = (token or "").replace("Ċ", "\n").lstrip("Ġ▁ ").removeprefix("##")
        ends[index] = bare in marks or token == "<0x0A>"
    return ends
