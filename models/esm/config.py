"""Defines ESM's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ..config import PositionCount, Probability, Range, TokenId, VocabSize
from ..roberta.config import RobertaConfig


@dataclass
class EsmConfig(RobertaConfig):
    """The sizes and constants of an ESM. Names, meanings and defaults are those of transformers.

    Attributes:
        emb_layer_norm_before: Whether the embeddings are normalized.
        token_dropout: Whether masked tokens have the embedding 0, and the others of their sequence
            are multiplied to make up for it.
    """

    model_type: ClassVar[str] = "esm"
    position_types: ClassVar[tuple[str, ...]] = ("absolute", "rotary")

    vocab_size: VocabSize = 33
    mask_token_id: TokenId | None = None
    max_position_embeddings: PositionCount = 1026
    rope_theta: Annotated[float, Range(0, 1e12, above=True)] = 10000.0
    hidden_act: Literal["gelu"] = "gelu"  # type: ignore[assignment] - one of the base's
    hidden_dropout_prob: Probability = 0.1
    bos_token_id: TokenId | None = None
    emb_layer_norm_before: bool | None = None
    token_dropout: bool | None = False
    is_folding_model: bool | None = False
    architecture: str = "EsmForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_decoder:
            raise ValueError("an ESM is supported only as an encoder: is_decoder must be false")
        if self.is_folding_model:
            raise ValueError("ESMFold is not supported: is_folding_model must be false")
        if self.token_dropout and self.mask_token_id is None:
            raise ValueError("token_dropout needs the mask_token_id")
        if self.is_rotary and (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                "rotary positions turn pairs of features: the head size "
                f"{self.hidden_size // self.num_attention_heads} must be even"
            )

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type == "rotary"

    @property
    def has_segments(self) -> bool:
        return False

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence. Rotary positions have no table, and count from 0."""
        if self.is_rotary:
            return self.max_position_embeddings
        return super().max_sequence_length

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        for name in ("type_vocab_size", "hidden_act", "classifier_dropout"):
            values.pop(name, None)  # which ESM does not have
        return values
