"""Defines GLM-4's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
class Glm4Config(DecoderConfig):
    """The sizes and constants of a GLM-4-0414.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "glm4"
    default_rotated: ClassVar[float] = 0.5
    rotates_any_part: ClassVar[bool] = True
    interleaved: ClassVar[bool] = True
    sandwich_norms: ClassVar[bool] = True

    vocab_size: VocabSize = 151552
    intermediate_size: InnerSize = 13696
    num_hidden_layers: LayerCount = 40
    num_key_value_heads: HeadCount | None = 2
    head_dim: HiddenSize | None = 128
    max_position_embeddings: PositionCount = 131072
    rms_norm_eps: NormEpsilon = 1.5625e-7
    attention_bias: bool = True
    pad_token_id: TokenId | None = 151329
    eos_token_id: TokenId | list[TokenId] | None = None
    architecture: str = "Glm4ForCausalLM"

    @property
    def output_bias(self) -> bool:
        return False
