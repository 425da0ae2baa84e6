"""Defines NLLB-MoE's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..config import Probability, Range
from ..m2m_100.config import M2M100Config
from ..mixtral.config import ExpertCount, LossWeight

SparseStep = Annotated[int, Range(0, 2**16)]


@dataclass
class NllbMoeConfig(M2M100Config):
    """The sizes and constants of an NLLB-MoE. Names, meanings and defaults are those of
    transformers.

    Attributes:
        expert_capacity: The number of tokens of a call that an expert computes at most in training.
        moe_eval_capacity_token_fraction: The share of a call's tokens that it computes at most in
            evaluation; with 0 or less as in training.
        encoder_sparse_step, decoder_sparse_step: Every so many layers of a stack, the last of them
            has a mixture; 0 for none.
        second_expert_policy: How the second expert is chosen. Only "all" chooses it without noise,
            which would depend on the layout.
        normalize_router_prob_before_dropping, batch_prioritized_routing: See `normalize_first` and
            `prioritize` of `ops.route_twice_within_capacity`.
        router_ignore_padding_tokens: Whether padding is routed like other tokens, in spite of its
            name; otherwise no expert computes it.
        moe_token_dropout: The rate at which results of experts are dropped.
        router_z_loss_coef: Without effect, as in transformers.
        router_aux_loss_coef: The factor of the auxiliary loss.
        output_router_logits: Whether a call that does not say so itself adds it to the loss.
    """

    model_type: ClassVar[str] = "nllb-moe"

    num_experts: ExpertCount = 128
    expert_capacity: Annotated[int, Range(1, 2**31 - 1)] = 64
    encoder_sparse_step: SparseStep = 4
    decoder_sparse_step: SparseStep = 4
    router_bias: bool = False
    router_dtype: Literal["float32"] = "float32"
    router_ignore_padding_tokens: bool = False
    router_z_loss_coef: LossWeight = 0.001
    router_aux_loss_coef: LossWeight = 0.001
    second_expert_policy: Literal["all"] = "all"
    normalize_router_prob_before_dropping: bool = False
    batch_prioritized_routing: bool = False
    moe_eval_capacity_token_fraction: Annotated[float, Range(-(2**31), 1)] = 1.0
    moe_token_dropout: Probability = 0.2
    output_router_logits: bool = False
    architecture: str = "NllbMoeForConditionalGeneration"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts < 2:
            raise ValueError(f"num_experts={self.num_experts} must be at least 2, a token's number")

    @property
    def expert_count(self) -> int:
        return self.num_experts

    @property
    def mlp_dropout(self) -> float:
        return self.activation_dropout

    def has_experts(self, layer: int, is_decoder: bool) -> bool:
        """Returns whether a layer of a stack has a mixture instead of a single MLP."""
        step = self.decoder_sparse_step if is_decoder else self.encoder_sparse_step
        return step > 0 and (layer + 1) % step == 0
