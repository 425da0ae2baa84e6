"""Defines EuroBERT's configuration: Llama's keys with other defaults, and the classifier's pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config import (
    HeadCount,
    HiddenSize,
    InnerSize,
    LayerCount,
    NormEpsilon,
    PositionCount,
    TokenId,
    VocabSize,
)
from ..llama.config import DecoderConfig


@dataclass
class EuroBertConfig(DecoderConfig):
    """The sizes and constants of a EuroBERT.

    Names, meanings and defaults are those of transformers.

    Attributes:
        classifier_pooling: Which states represent a sequence: the first token's ("bos"), their mean
            ("mean"), or the mean of what the classifier's dense layer makes of them ("late").
    """

    model_type: ClassVar[str] = "eurobert"

    vocab_size: VocabSize = 128256
    hidden_size: HiddenSize = 768
    intermediate_size: InnerSize = 3072
    num_hidden_layers: LayerCount = 12
    num_attention_heads: HeadCount = 12  # type: ignore[assignment] - a property of the base
    max_position_embeddings: PositionCount = 8192
    rms_norm_eps: NormEpsilon = 1e-5
    pad_token_id: TokenId | None = 128001
    bos_token_id: TokenId | None = 128000
    eos_token_id: TokenId | list[TokenId] | None = 128001
    mask_token_id: TokenId | None = 128002
    classifier_pooling: Literal["bos", "mean", "late"] = "late"
    architecture: str = "EuroBertForMaskedLM"
