"""Defines Gemma's configuration, with the keys of Hugging Face's `config.json`, and what its
successors' share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import (
    Activation,
    HeadCount,
    HiddenSize,
    InnerSize,
    LayerCount,
    PositionCount,
    TokenId,
    VocabSize,
)
from ..llama.config import DecoderConfig


@dataclass
class GemmaConfig(DecoderConfig):
    """The sizes and constants of a Gemma.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "gemma"
    norm_offset: ClassVar[float | None] = 1.0

    vocab_size: VocabSize = 256000
    hidden_size: HiddenSize = 3072
    intermediate_size: InnerSize = 24576
    num_hidden_layers: LayerCount = 28
    num_attention_heads: HeadCount = 16  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = 16
    head_dim: HiddenSize | None = 256
    hidden_act: Activation = "gelu_pytorch_tanh"
    max_position_embeddings: PositionCount = 8192
    use_bidirectional_attention: bool | None = None
    tie_word_embeddings: bool = True
    pad_token_id: TokenId | None = 0
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[TokenId] | None = 1
    architecture: str = "GemmaForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act == "gelu":
            # The first files say so, but the models were trained with the approximation.
            object.__setattr__(self, "hidden_act", "gelu_pytorch_tanh")
        if self.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention=true makes an encoder of a Gemma, which is not "
                "supported: it must be false"
            )
        if self.mlp_bias:
            raise ValueError(
                f"the MLPs of {self.model_type} have no biases: mlp_bias must be false"
            )
