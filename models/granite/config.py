"""Defines Granite's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config import Range, TokenId
from ..llama.config import DecoderConfig

Multiplier = Annotated[float, Range(1e-6, 1e6)]


@dataclass
class GraniteConfig(DecoderConfig):
    """The sizes and constants of a Granite 3.

    Names, meanings and defaults are those of transformers.

    Attributes:
        embedding_multiplier: Multiplies the embeddings.
        attention_multiplier: Multiplies the scores, instead of 1 / sqrt(head size).
        residual_multiplier: Multiplies the outputs of attention and MLP before they are added.
        logits_scaling: Divides the logits.
    """

    model_type: ClassVar[str] = "granite"

    embedding_multiplier: Multiplier = 1.0
    attention_multiplier: Multiplier = 1.0
    residual_multiplier: Multiplier = 1.0
    logits_scaling: Multiplier = 1.0
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    architecture: str = "GraniteForCausalLM"

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier
