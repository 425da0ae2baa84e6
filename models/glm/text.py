"""Encodes and decodes texts with blanks for GLM."""

from __future__ import annotations

import re
from pathlib import Path

from ...data.tokenizers.glm_tokens import (
    GLMTokens,
    GLMVocabulary,
    find_glm_vocabulary,
    glm_tokenizer,
)
from ...data.tokenizers.tokenizer import load_tokenizer

_VOCABULARIES: dict[int, GLMVocabulary] = {
    30522: "bert",
    50257: "gpt2",
    50265: "roberta",
    50000: "chinese",
}
_BLANK = re.compile(r"(\[g?s?MASK\])")


class GLMText:
    """Encodes a text as `[CLS]`, the text with its blanks, and the end of text unless the text ends
    with `[gMASK]`.

    Args:
        folder: The folder with the tokenizer's files.
        vocabulary: The vocabulary that GLM's special tokens extend. None finds it by the special
            tokens, or a released vocabulary by its size; that of glm-10b-chinese must be named.
    """

    def __init__(self, folder: Path, vocabulary: GLMVocabulary | None = None) -> None:
        self.tokenizer = load_tokenizer(folder)
        vocabulary = vocabulary or find_glm_vocabulary(self.tokenizer)
        vocabulary = vocabulary or _VOCABULARIES.get(self.tokenizer.vocab_size)
        if vocabulary is None:
            raise ValueError(
                f"no GLM release has a vocabulary of {self.tokenizer.vocab_size} tokens; name "
                "the one that it extends by glm_vocabulary: bert, gpt2, roberta, chinese or "
                "chinese-10b"
            )
        self.tokens: GLMTokens = glm_tokenizer(self.tokenizer, vocabulary)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text.

        If it has no blank, [gMASK] is appended, so that the model continues it.
        """
        if not _BLANK.search(text):
            text += " [gMASK]"
        blanks = {
            "[MASK]": self.tokens.mask,
            "[sMASK]": self.tokens.smask,
            "[gMASK]": self.tokens.gmask,
        }
        ids = [self.tokens.cls]
        for part in _BLANK.split(text):
            ids += (
                [blanks[part]]
                if part in blanks
                else self.tokenizer.encode(part)
                if part.strip()
                else []
            )
        return ids if ids[-1] == self.tokens.gmask else [*ids, self.tokens.eos]

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        special = {value for name, value in vars(self.tokens).items() if name != "vocab_size"}
        return self.tokenizer.decode([token for token in ids if token not in special])
