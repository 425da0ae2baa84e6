"""Defines DeepSeek-V3's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config import (
    HeadCount,
    HiddenSize,
    InnerSize,
    LayerCount,
    PositionCount,
    Range,
    TokenId,
    VocabSize,
)
from ..glm4_moe.config import CorrectedMixtureConfig, LayerNumber
from ..mixtral.config import ExpertCount


@dataclass
class DeepseekV3Config(CorrectedMixtureConfig):
    """A configuration of DeepSeek-V3 or DeepSeek-R1, or of Moonlight. Defaults are those of
    transformers.

    Attributes:
        q_lora_rank: The width of the vector that queries are made from; None if it is the hidden
            state itself.
        kv_lora_rank: The width of the vector that keys and values are made from.
        qk_nope_head_dim: The features of a head's queries and keys that are not rotated.
        qk_rope_head_dim: Those that are; heads share those of keys. `head_dim` is the same number.
        v_head_dim: The features of a head's values.
        rope_interleave: Whether neighboring features rotate together.
    """

    model_type: ClassVar[str] = "deepseek_v3"

    vocab_size: VocabSize = 129280
    hidden_size: HiddenSize = 7168
    intermediate_size: InnerSize = 18432
    num_hidden_layers: LayerCount = 61
    num_attention_heads: HeadCount = 128  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = 128
    max_position_embeddings: PositionCount = 4096
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 1
    moe_intermediate_size: InnerSize = 2048
    n_routed_experts: ExpertCount = 256
    n_group: ExpertCount = 8
    topk_group: ExpertCount = 4
    routed_scaling_factor: Annotated[float, Range(0, 1e6, above=True)] = 2.5
    first_k_dense_replace: LayerNumber = 3
    q_lora_rank: HiddenSize | None = 1536
    kv_lora_rank: HiddenSize = 512
    qk_nope_head_dim: HiddenSize = 128
    qk_rope_head_dim: HiddenSize = 64
    v_head_dim: HiddenSize = 128
    rope_interleave: bool = True
    architecture: str = "DeepseekV3ForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        # As in transformers, whatever the file says.
        vars(self)["head_dim"] = self.qk_rope_head_dim
        if self.key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must be num_attention_heads="
                f"{self.num_attention_heads} in deepseek_v3: heads share one latent vector instead"
            )

    def check_heads(self, hidden_size: int, heads: int) -> None:
        """Allows any number of heads, whose sizes are settings of their own."""

    @property
    def head_size(self) -> int:
        """The features of a head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def interleaved(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rope_interleave

    @property
    def qk_head_dim(self) -> int:
        """The features of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """What the scores are multiplied by: also by the square of YaRN's `mscale_all_dim`."""
        scale = self.qk_head_dim**-0.5
        weight = self.rope.get("mscale_all_dim") or 0
        if self.rope["rope_type"] == "default" or not weight or self.rope["factor"] <= 1:
            return scale
        return scale * (0.1 * weight * math.log(self.rope["factor"]) + 1.0) ** 2
