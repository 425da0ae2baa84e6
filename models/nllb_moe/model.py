"""NLLB-MoE (NLLB Team, 2022, "No Language Left Behind: Scaling Human-Centered Machine Translation",
arXiv:2207.04672).

- M2M100's stacks; every n-th block has a mixture of experts in place of the MLP
- a linear router, in fp32, chooses two of E experts for each token, whose results are weighted by
  their probabilities, divided by the sum of both
- of a call's tokens, an expert computes as many as its capacity says; padding has no expert
- each expert is an MLP with biases, without a gate; elements of its results are dropped in training,
  and the results are scaled down otherwise
- an auxiliary loss balances the experts, if `output_router_logits`
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...mpu import ParallelExperts, ParallelMesh
from ...ops import route_twice_within_capacity
from ..bart.model import BartBackbone, BartBlock, BartStack
from ..blocks.activation_functions import find_activation
from ..blocks.moe import Router, RouterSums, flatten_logits, refuse_split_rows
from ..generation.mixin import GenerationMixin
from ..parallel_config import ParallelConfig, layer_arguments
from ..seq2seq_mixture import MixtureSeq2SeqLM, MixtureSeq2SeqModel
from .config import NllbMoeConfig


class NllbMoeMLP(nn.Module):
    """The weighted sum of the two experts that a router chooses for each token."""

    def __init__(
        self,
        config: NllbMoeConfig,
        inner_size: int,
        *,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        refuse_split_rows(mesh)
        shared = layer_arguments(mesh, parallel_config)
        self.config = config
        self.router = Router(
            config.d_model, config.num_experts, bias=config.router_bias, wide=True, **shared
        )
        self.experts = ParallelExperts(
            config.d_model,
            inner_size,
            config.num_experts,
            find_activation(config.activation_function),
            gated=False,
            bias=True,
            dropout=config.activation_dropout,
            output_dropout=config.moe_token_dropout,
            drops_tokens=True,
            **shared,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to the same shape.

        Args:
            mask: The attention's mask, broadcastable to [B, N, S, M + S] after M cached positions.
        """
        config = self.config
        logits = self.router(x)
        batch, length, _ = logits.shape
        is_token = None
        if mask is not None and not config.router_ignore_padding_tokens:
            is_token = mask[:, 0, -1, -length:]
            if is_token.is_floating_point():
                is_token = is_token == 0
            is_token = is_token.expand(batch, length).reshape(-1)
        capacity = config.expert_capacity
        if not self.training and config.moe_eval_capacity_token_fraction > 0:
            capacity = math.ceil(config.moe_eval_capacity_token_fraction * batch * length)
        weights, experts = route_twice_within_capacity(
            logits.flatten(0, 1),
            capacity,
            x.dtype,
            is_token,
            normalize_first=config.normalize_router_prob_before_dropping,
            prioritize=config.batch_prioritized_routing,
        )
        if not self.training:
            # Unlike other dropouts, this one scales in evaluation, too, as in transformers.
            weights = weights.to(logits.dtype) * (1 - config.moe_token_dropout)
        return self.experts(x, weights.view(batch, length, 2), experts.view(batch, length, 2))


class NllbMoeBlock(BartBlock):
    """A block of M2M100, some of which have a mixture."""

    def build_mlp(self, config: Any, is_decoder: bool, layer: int, **arguments: Any) -> nn.Module:
        if not config.has_experts(layer, is_decoder):
            return super().build_mlp(config, is_decoder, layer, **arguments)
        inner = config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim
        return NllbMoeMLP(config, inner, **arguments)

    def bind_mlp(self, mask: Any) -> Callable[[Tensor], Tensor]:
        if isinstance(self.mlp, NllbMoeMLP):
            return partial(self.mlp, mask=mask)
        return self.mlp


class NllbMoeStack(BartStack):
    """The encoder or the decoder of an NLLB-MoE."""

    block_class = NllbMoeBlock

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        if pieces is not None:
            raise ValueError(
                "packed rows are not supported in nllb-moe: its routers would not know the pieces"
            )
        return super().embed(words, ids, cached, pieces)


class NllbMoeBackbone(BartBackbone):
    """Encoder and decoder without a head."""

    stack_class = NllbMoeStack
    drops_padding = False  # the routers need to know it


class NllbMoeForConditionalGeneration(MixtureSeq2SeqLM, NllbMoeBackbone, GenerationMixin):
    """NLLB-MoE that answers a text with another one."""

    experts_per_token = 2

    def compute_auxiliary(
        self, sums: RouterSums, is_decoder: bool, by_sample: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, sums.balance_loss_by_sample() if by_sample else sums.balance_loss()

    def shape_logits(self, logits: list[Tensor]) -> tuple[Tensor, ...]:
        return flatten_logits(logits)


class NllbMoeModel(MixtureSeq2SeqModel, NllbMoeBackbone):
    """NLLB-MoE without a head."""

    def shape_logits(self, logits: list[Tensor]) -> tuple[Tensor, ...]:
        return flatten_logits(logits)
