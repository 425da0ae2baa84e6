"""Identifies a vocabulary by the tokens of its ids, whatever file they were read from."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from ...files.strict_json import is_object
from .files import TOKENIZER_FILES
from .tokenizer import Tokenizer

# The length that stands for an id without a token.
HOLE = (-1).to_bytes(4, "little", signed=True)


@dataclass(frozen=True)
class Vocabulary:
    """The size of a vocabulary and the SHA-256 of its tokens in the order of their ids.

    T5's `spiece.model` and its `tokenizer.json` hold the same vocabulary, so both give the same
    digest.
    """

    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size:,} tokens, sha256 {self.sha256[:12]}…"

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
        """Returns the vocabulary of a tokenizer, or of its first `size` ids.

        Ids beyond its tokens count as holes.
        """
        if size is None:
            size = tokenizer.vocab_size
        parts: list[bytes] = []
        for token in tokenizer.tokens(size):
            if token is None:
                parts.append(HOLE)
            else:
                raw = token.encode("utf-8", "surrogatepass")
                parts.append(len(raw).to_bytes(4, "little"))
                parts.append(raw)
        return cls(size, hashlib.sha256(b"".join(parts)).hexdigest())

    @classmethod
    def from_json(cls, value: Any, what: str) -> Vocabulary:
        """Returns the vocabulary of a parsed JSON object.

        ValueError, naming `what`, if it is none.
        """
        if is_object(value):
            size = value.get("size")
            digest = value.get("sha256")
            is_digest = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
            if is_digest and type(size) is int and 0 <= size < 1 << 31:
                return cls(size, str(digest))
        raise ValueError(
            f"{what}: a vocabulary must have a size and the hexadecimal sha256 of its tokens, "
            f"not {value!r:.100}"
        )

    def begins(self, tokenizer: Tokenizer) -> bool:
        """Returns whether the tokenizer's first `size` ids have these tokens.

        Tokens may have been added behind.
        """
        return (
            tokenizer.vocab_size >= self.size
            and Vocabulary.from_tokenizer(tokenizer, self.size) == self
        )


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Returns a digest of all that decides how a tokenizer encodes: its files and the tokens added
    to them.
    """
    path = tokenizer.path
    files = [path] if path.is_file() else [path / name for name in TOKENIZER_FILES]
    digest = hashlib.sha256(Vocabulary.from_tokenizer(tokenizer).sha256.encode())
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()
