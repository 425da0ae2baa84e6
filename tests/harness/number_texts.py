"""Texts whose words are token ids, so that a test can count what is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardzoo.data import Objective, ObjectiveDataset, Tokenizer


class Numbers(Tokenizer):
    """A text is a list of token ids; [MASK] and so on are the lowest."""

    def __init__(self, vocab_size=100_000, **special):
        self.vocab_size, self.special = vocab_size, special

    def encode_batch(self, texts):
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))

    def token_to_id(self, token):
        return None

    def id_to_token(self, index):
        return str(index)

    def add_tokens(self, tokens):
        self.vocab_size += len(tokens)

    def save(self, folder):
        (folder / "numbers.txt").write_text(str(self.vocab_size))


@dataclass(frozen=True)
class Plain(Objective):
    """Packed tokens as they are."""

    name: ClassVar[str] = "plain"
    format: ClassVar = "masked"

    def build(self, indexed, tokenizer, data):
        unchanged = lambda tokens, generator: {"input_ids": tokens, "labels": tokens}  # noqa: E731
        return ObjectiveDataset(indexed, data.sequence_length, unchanged, seed=data.seed)
