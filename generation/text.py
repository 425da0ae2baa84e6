"""Text to a model's prompts and tokens back to text, for each kind of model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.tokenizers.glm_tokens import Family, GLMTokens, glm_tokenizer
from ..data.tokenizers.tokenizer import load_tokenizer

_GLM_BASES: dict[int, Family] = {30522: "bert", 50257: "gpt2", 50265: "roberta", 50000: "chinese"}
_BLANK = re.compile(r"(\[g?s?MASK\])")


def load_text_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder. ValueError if it has none; nothing is downloaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that transformers reads: {error}") from None


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids of several prompts and their mask, int64 [B, T] each."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


class GLMText:
    """GLM's texts: `[CLS]`, the text with its blanks, and the end of text unless `[gMASK]` continues it.

    family: of the vocabulary; None finds the released ones by their size. glm-10b-chinese must be named.
    """

    def __init__(self, folder: Path, family: Family | None = None) -> None:
        self.tokenizer = load_tokenizer(folder)
        family = family or _GLM_BASES.get(self.tokenizer.vocab_size)
        if family is None:
            raise ValueError(
                f"a vocabulary of {self.tokenizer.vocab_size} tokens is none of GLM's releases; say which it extends: "
                "bert, gpt2, roberta, chinese or chinese-10b"
            )
        self.tokens: GLMTokens = glm_tokenizer(self.tokenizer, family)

    def encode(self, text: str) -> list[int]:
        """Without a blank, [gMASK] is appended: the text is continued."""
        if not _BLANK.search(text):
            text += " [gMASK]"
        blanks = {"[MASK]": self.tokens.mask, "[sMASK]": self.tokens.smask, "[gMASK]": self.tokens.gmask}
        ids = [self.tokens.cls]
        for part in _BLANK.split(text):
            ids += [blanks[part]] if part in blanks else self.tokenizer.encode(part) if part.strip() else []
        return ids if ids[-1] == self.tokens.gmask else [*ids, self.tokens.eos]

    def decode(self, ids: list[int]) -> str:
        special = {value for name, value in vars(self.tokens).items() if name != "vocab_size"}
        return self.tokenizer.decode([token for token in ids if token not in special])
