"""Defines RoBERTa's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..bert.config import BertConfig
from ..config import TokenId, VocabSize


@dataclass
class RobertaConfig(BertConfig):
    """The sizes and constants of a RoBERTa.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "roberta"

    vocab_size: VocabSize = 50265
    pad_token_id: TokenId | None = 1
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 2
    architecture: str = "RobertaForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token_id is None:
            raise ValueError(
                "RoBERTa counts positions from its padding token's id: pad_token_id must be an "
                "integer"
            )
        if self.max_sequence_length < 1:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} leaves no position "
                "after that of padding "
                f"({self.pad_token_id}); use at least {self.pad_token_id + 2}"
            )

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence. Tokens do not use the positions up to that of padding."""
        return self.max_position_embeddings - self.position_padding_idx - 1

    @property
    def position_padding_idx(self) -> int:
        assert self.pad_token_id is not None
        return self.pad_token_id

    @property
    def head_act(self) -> str:
        return "gelu"
