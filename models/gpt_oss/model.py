"""gpt-oss (OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925).

- Mixtral's blocks, with biases in attention; YaRN's rotary positions
- each attention head has a sink: a trained logit that joins the softmax and has no value
- every other layer attends within a sliding window
- a linear router with biases; a token's weights are the softmax of its k highest scores
- each expert is a clamped SwiGLU with biases, whose gate and up projections are interleaved
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelExperts, ParallelMesh
from ...ops import clamped_swiglu, route_tokens
from ..blocks.moe import Router
from ..generation.mixin import GenerationMixin
from ..heads import SequenceClassification, TokenClassification
from ..llama.model import LlamaBackbone
from ..mixtral.model import MixtralBlock, MixtureCausalLM, MixtureModel
from ..parallel_config import ParallelConfig, layer_arguments
from .config import GptOssConfig


class GptOssMLP(nn.Module):
    """The weighted sum of each token's k experts."""

    def __init__(
        self, config: GptOssConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__()
        shared = layer_arguments(mesh, parallel_config)
        self.top_k = config.num_experts_per_tok
        self.alpha = config.swiglu_alpha
        self.limit = config.swiglu_limit
        self.router = Router(config.hidden_size, config.num_local_experts, **shared)
        self.experts = ParallelExperts(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            self.activate,
            interleaved=True,
            bias=True,
            **shared,
        )

    def activate(self, projected: Tensor) -> Tensor:
        """[n, 2Fp] -> [n, Fp]"""
        return clamped_swiglu(projected, self.alpha, self.limit)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to the same shape."""
        weights, experts = route_tokens(self.router(x), self.top_k, softmax_first=False)
        return self.experts(x, weights, experts)


class GptOssBlock(MixtralBlock):
    """A block of gpt-oss."""

    def build_mlp(
        self, config: Any, layer: int, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> nn.Module:
        return GptOssMLP(config, mesh, parallel_config)


class GptOssBackbone(LlamaBackbone):
    """gpt-oss without a head. With `mesh=None` the model is not split."""

    config: Any  # a GptOssConfig
    block_class = GptOssBlock

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(("gate_up_bias", "down_bias")):
            full.zero_()
        elif name.endswith("router.bias"):
            full.normal_(0.0, self.config.initializer_range, generator=generator)
        else:
            super().initialize_parameter(name, full, generator)


class GptOssForCausalLM(MixtureCausalLM, GptOssBackbone, GenerationMixin):
    """gpt-oss that predicts the next token."""


class GptOssModel(MixtureModel, GptOssBackbone):
    """gpt-oss without a head."""


class GptOssForSequenceClassification(SequenceClassification, GptOssBackbone):
    """gpt-oss that classifies a text."""

    pooling = "last"
    dropout_rate = None
    bias = False
    linear_name = "classifier"


class GptOssForTokenClassification(TokenClassification, GptOssBackbone):
    """gpt-oss that classifies each token."""

    linear_name = "classifier"
