"""Defines DeBERTa-v2's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ..bert.config import BertConfig
from ..config import (
    Activation,
    HeadCount,
    HiddenSize,
    InnerSize,
    LayerCount,
    NormEpsilon,
    Probability,
    Range,
    VocabSize,
)

PositionTerm = Literal["c2p", "p2c"]
TERMS: tuple[PositionTerm, ...] = ("c2p", "p2c")


@dataclass
class DebertaV2Config(BertConfig):
    """The sizes and constants of a DeBERTa-v2 or v3.

    Names, meanings and defaults are those of transformers.

    Attributes:
        relative_attention: Whether scores have terms of relative positions.
        pos_att_type: These terms, as a list or joined by "|": "c2p", what a query says to a position,
            and "p2c", what a position says to a key.
        share_att_key: Whether the projections of queries and keys project relative positions too.
        position_buckets: Relative positions are rounded to so many buckets on either side;
            `max_relative_positions` are not rounded if it is less than 1.
        norm_rel_ebd: "layer_norm" if the embeddings of relative positions are normalized.
        position_biased_input: Whether the input has learned positions too.
        cls_dropout: The dropout before the classifier; `hidden_dropout_prob` by default.
    """

    model_type: ClassVar[str] = "deberta-v2"

    vocab_size: VocabSize = 128100
    hidden_size: HiddenSize = 1536
    num_hidden_layers: LayerCount = 24
    num_attention_heads: HeadCount = 24
    intermediate_size: InnerSize = 6144
    type_vocab_size: Annotated[int, Range(0, 2**31 - 1)] = 0  # type: ignore[assignment]
    layer_norm_eps: NormEpsilon = 1e-7
    relative_attention: bool = False
    max_relative_positions: Annotated[int, Range(-1, 2**31 - 1)] = -1
    position_buckets: Annotated[int, Range(-1, 2**31 - 1)] = -1
    norm_rel_ebd: str = "none"
    share_att_key: bool = False
    pos_att_type: str | list[str] | None = None
    position_biased_input: bool = True
    pooler_dropout: Probability = 0.0
    pooler_hidden_act: Activation = "gelu"
    pooler_hidden_size: HiddenSize | None = None
    cls_dropout: Probability | None = None
    legacy: bool = True
    conv_kernel_size: Annotated[int, Range(0, 2**16)] = 0
    embedding_size: HiddenSize | None = None
    attention_head_size: HiddenSize | None = None
    architecture: str = "DebertaV2ForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = set(self.position_names) - set(TERMS)
        if unknown:
            raise ValueError(
                f"pos_att_type has the terms c2p and p2c, not {', '.join(sorted(unknown))}"
            )
        if self.is_decoder:
            raise ValueError("a DeBERTa is supported only as an encoder: is_decoder must be false")
        if self.conv_kernel_size > 0:
            raise ValueError(
                "the convolution of DeBERTa-v2 is not supported: conv_kernel_size="
                f"{self.conv_kernel_size} must be 0, as in DeBERTa-v3"
            )
        if not self.legacy:
            raise ValueError("the head with legacy=false is not supported: it must be true")
        head_size = self.hidden_size // self.num_attention_heads
        equal = {
            "pooler_hidden_size": self.hidden_size,
            "embedding_size": self.hidden_size,
            "attention_head_size": head_size,
        }
        for name, wanted in equal.items():
            if getattr(self, name) not in (None, wanted):
                raise ValueError(f"{name}={getattr(self, name)} is not supported: use {wanted}")
        if self.position_buckets > 0 and self.position_buckets // 2 >= self.relative_positions - 1:
            raise ValueError(
                f"position_buckets={self.position_buckets} must be less than twice the "
                f"{self.relative_positions} relative positions that they round"
            )

    @property
    def position_names(self) -> list[str]:
        names = self.pos_att_type or []
        if isinstance(names, str):
            names = names.lower().split("|")
        return [name.strip() for name in names if name.strip()]

    @property
    def position_terms(self) -> tuple[PositionTerm, ...]:
        """The terms of relative positions that the scores have."""
        return tuple(term for term in TERMS if term in self.position_names)

    @property
    def relative_positions(self) -> int:
        """The number of relative positions on either side."""
        if self.max_relative_positions < 1:
            return self.max_position_embeddings
        return self.max_relative_positions

    @property
    def position_span(self) -> int:
        """The number of embeddings of relative positions on either side."""
        return self.position_buckets if self.position_buckets > 0 else self.relative_positions

    @property
    def norms_positions(self) -> bool:
        return "layer_norm" in self.norm_rel_ebd.lower()

    @property
    def has_segments(self) -> bool:
        return self.type_vocab_size > 0

    @property
    def classifier_dropout_prob(self) -> float:
        return self.hidden_dropout_prob if self.cls_dropout is None else self.cls_dropout

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        for name in ("pooler_hidden_size", "embedding_size", "attention_head_size", "cls_dropout"):
            if values[name] is None:
                del values[name]  # which transformers would read as a size
        return values
