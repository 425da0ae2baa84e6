"""Defines OLMoE's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config import (
    HiddenSize,
    InnerSize,
    LayerCount,
    NormEpsilon,
    PositionCount,
    Range,
    TokenId,
    VocabSize,
)
from ..mixtral.config import ExpertCount, LossWeight, MixtureConfig


@dataclass
class OlmoeConfig(MixtureConfig):
    """The sizes and constants of an OLMoE. Names, meanings and defaults are those of transformers.

    Attributes:
        intermediate_size: The inner width of an expert.
        clip_qkv: The largest absolute value of queries, keys and values; None for any.
        norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
    """

    model_type: ClassVar[str] = "olmoe"
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    qk_norm: ClassVar[bool] = True
    norms_all_heads: ClassVar[bool] = True

    vocab_size: VocabSize = 50304
    hidden_size: HiddenSize = 2048
    intermediate_size: InnerSize = 2048
    num_hidden_layers: LayerCount = 16
    num_attention_heads: Annotated[int, Range(1, 2**16)] = 16  # type: ignore[assignment]
    max_position_embeddings: PositionCount = 4096
    rms_norm_eps: NormEpsilon = 1e-5
    pad_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 50279
    clip_qkv: Annotated[float, Range(0, 1e9, above=True)] | None = None
    num_experts_per_tok: ExpertCount = 8
    num_experts: ExpertCount = 64
    router_aux_loss_coef: LossWeight = 0.01
    norm_topk_prob: bool = False
    architecture: str = "OlmoeForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_head_dim is not None:
            # transformers' norms have this width, whatever `head_dim` says.
            self.check_heads(self.hidden_size, self.num_attention_heads)
            if self.head_size * self.num_attention_heads != self.hidden_size:
                raise ValueError(
                    f"head_dim={self.head_dim} must be hidden_size / num_attention_heads = "
                    f"{self.hidden_size // self.num_attention_heads} in olmoe"
                )

    @property
    def expert_count(self) -> int:
        return self.num_experts

    @property
    def normalizes_weights(self) -> bool:
        return self.norm_topk_prob

    @property
    def clip(self) -> float | None:
        return self.clip_qkv
