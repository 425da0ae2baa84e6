"""Defines Marian's configuration: BART's keys with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..bart.config import BartConfig
from ..config import ClassCount, TokenId, VocabSize


@dataclass
class MarianConfig(BartConfig):
    """The sizes and constants of a Marian.

    Names, meanings and defaults are those of transformers.

    Attributes:
        decoder_vocab_size: Must be `vocab_size`, or None for the same.
        share_encoder_decoder_embeddings: Must be true, as in all of OPUS-MT's models with one
            vocabulary.
    """

    model_type: ClassVar[str] = "marian"
    embedding_norm: ClassVar[bool] = False
    learned_positions: ClassVar[bool] = False
    positions_count_padding: ClassVar[bool] = True

    vocab_size: VocabSize = 58101
    decoder_vocab_size: VocabSize | None = None
    share_encoder_decoder_embeddings: bool = True
    pad_token_id: TokenId | None = 58100
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = 0
    decoder_start_token_id: TokenId | None = 58100
    forced_eos_token_id: TokenId | list[TokenId] | None = 0
    num_labels: ClassCount = 2
    architecture: str = "MarianMTModel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_embeddings:
            raise ValueError(
                "marian's encoder and decoder share one word embedding: tie_word_embeddings must be "
                "true; an output head that the files store may differ from it"
            )
        is_shared = self.decoder_vocab_size in (None, self.vocab_size)
        if not self.share_encoder_decoder_embeddings or not is_shared:
            raise ValueError(
                "marian's encoder and decoder share one word embedding: "
                "share_encoder_decoder_embeddings must be true and decoder_vocab_size "
                f"{self.vocab_size}, not {self.decoder_vocab_size}"
            )
