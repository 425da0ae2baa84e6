"""Defines OLMo 2's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import NormEpsilon, TokenId, VocabSize
from ..llama.config import DecoderConfig


@dataclass
class Olmo2Config(DecoderConfig):
    """The sizes and constants of an OLMo 2.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "olmo2"
    qk_norm: ClassVar[bool] = True
    norms_all_heads: ClassVar[bool] = True
    norm_offset: ClassVar[float | None] = 0.0
    input_norms: ClassVar[bool] = False
    sandwich_norms: ClassVar[bool] = True

    vocab_size: VocabSize = 50304
    rms_norm_eps: NormEpsilon = 1e-5
    pad_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 50279
    architecture: str = "Olmo2ForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp_bias:
            raise ValueError("the MLPs of olmo2 have no biases: mlp_bias must be false")
