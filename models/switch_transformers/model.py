"""Switch Transformers (Fedus et al., 2021, "Switch Transformers: Scaling to Trillion Parameter
Models with Simple and Efficient Sparsity", arXiv:2101.03961).

- T5's stacks; every n-th block has a mixture of experts in place of the MLP
- a linear router, in fp32, chooses one of E experts for each token, whose result is multiplied by
  its probability
- of each row of a batch, an expert computes the first `expert_capacity` of its tokens; the result
  for the others is zero, so that only their residual goes on
- each expert is an MLP without a gate, with T5's dropout inside
- auxiliary losses balance the experts and keep the scores small, if `output_router_logits`
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelExperts, ParallelMesh
from ...ops import route_within_capacity
from ..blocks.activation_functions import find_activation
from ..blocks.moe import Router, RouterSums, refuse_split_rows
from ..generation.mixin import GenerationMixin
from ..parallel_config import ParallelConfig, layer_arguments
from ..seq2seq_mixture import MixtureSeq2SeqLM, MixtureSeq2SeqModel
from ..t5.model import T5Backbone, T5Block, T5EncoderBackbone, T5Stack
from .config import SwitchTransformersConfig


class SwitchMLP(nn.Module):
    """The result of the expert that a router chooses for each token, times its probability."""

    def __init__(
        self,
        config: SwitchTransformersConfig,
        *,
        dropout: float,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        refuse_split_rows(mesh)
        shared = layer_arguments(mesh, parallel_config)
        self.capacity = config.expert_capacity
        self.jitter = config.router_jitter_noise
        self.router = Router(
            config.d_model, config.num_experts, bias=config.router_bias, wide=True, **shared
        )
        self.experts = ParallelExperts(
            config.d_model,
            config.d_ff,
            config.num_experts,
            find_activation(config.activation),
            gated=False,
            dropout=dropout,
            drops_tokens=True,
            **shared,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to the same shape."""
        if self.training and self.jitter:
            raise ValueError(
                f"training with router_jitter_noise={self.jitter} is not supported: its noise "
                "would depend on the layout; set it to 0 in config.json"
            )
        logits = self.router(x)  # [B, S, E]
        weights, experts = route_within_capacity(logits, self.capacity, x.dtype)
        return self.experts(x, weights[..., None], experts[..., None])


class SwitchBlock(T5Block):
    """A block of T5, some of which have a mixture."""

    def build_mlp(self, config: Any, is_decoder: bool, layer: int, **arguments: Any) -> nn.Module:
        if not config.has_experts(layer, is_decoder):
            return super().build_mlp(config, is_decoder, layer, **arguments)
        return SwitchMLP(config, **arguments)


class SwitchStack(T5Stack):
    """The encoder or the decoder of a Switch Transformer."""

    block_class = SwitchBlock

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        if pieces is not None:
            raise ValueError(
                "packed rows are not supported in switch_transformers: the pieces of a row would "
                "share its experts' capacity"
            )
        return super().embed(words, ids, cached, pieces)


class SwitchEncoderBackbone(T5EncoderBackbone):
    """The encoder without a head. With `mesh=None` the model is not split."""

    stack_class = SwitchStack
    drops_padding = False  # padding has its places in the experts' capacity, as in transformers

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place, as transformers does."""
        if name.endswith(".router.weight"):
            full.normal_(0.0, self.config.initializer_factor, generator=generator)
            return
        super().initialize_parameter(name, full, generator)


class SwitchBackbone(SwitchEncoderBackbone, T5Backbone):
    """Encoder and decoder without a head."""


class SwitchTransformersForConditionalGeneration(MixtureSeq2SeqLM, SwitchBackbone, GenerationMixin):
    """A Switch Transformer that answers a text with another one."""

    experts_per_token = 1
    losses_count_padding = True

    def compute_auxiliary(
        self, sums: RouterSums, is_decoder: bool, by_sample: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.config.find_sparse_step(is_decoder) <= 1:
            return None, None  # as in transformers
        z_loss = sums.z_loss_by_sample()
        balance = sums.balance_loss_by_sample()
        if by_sample:
            return z_loss, balance
        return z_loss.mean(), balance.mean()


class SwitchTransformersModel(MixtureSeq2SeqModel, SwitchBackbone):
    """A Switch Transformer without a head."""


class SwitchTransformersEncoderModel(MixtureSeq2SeqModel, SwitchEncoderBackbone):
    """The encoder of a Switch Transformer without a head."""
