"""Defines XLM-RoBERTa-XL's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import (
    ClassCount,
    HeadCount,
    HiddenSize,
    InnerSize,
    LayerCount,
    NormEpsilon,
    PositionCount,
    VocabSize,
)
from ..roberta.config import RobertaConfig


@dataclass
class XLMRobertaXLConfig(RobertaConfig):
    """The sizes and constants of an XLM-RoBERTa-XL.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "xlm-roberta-xl"

    vocab_size: VocabSize = 250880
    hidden_size: HiddenSize = 2560
    num_hidden_layers: LayerCount = 36
    num_attention_heads: HeadCount = 32
    intermediate_size: InnerSize = 10240
    max_position_embeddings: PositionCount = 514
    type_vocab_size: ClassCount = 1
    layer_norm_eps: NormEpsilon = 1e-5
    architecture: str = "XLMRobertaXLForMaskedLM"
