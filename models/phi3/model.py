"""Phi-3 (Abdin et al., 2024, arXiv:2404.14219) and Phi-4.

Llama with stacked projections in its files, and a dropout of the outputs of attention and MLP.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...mpu import ParallelMesh
from ..blocks.cache import LayerKVCache
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.rotary import Rotary
from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaBackbone,
    LlamaBlock,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    Masks,
)
from ..parallel_config import ParallelConfig
from .config import Phi3Config


class Phi3Block(LlamaBlock):
    """A block of Llama with dropout on the residual stream."""

    def __init__(
        self,
        config: Phi3Config,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__(config, layer, mesh, parallel_config)
        self.attention_dropout = residual_dropout(config.resid_pdrop, mesh, parallel_config)
        self.mlp_dropout = residual_dropout(config.resid_pdrop, mesh, parallel_config)

    def compute(
        self, x: Tensor, masks: Masks, rotary: Rotary, cache: LayerKVCache | None = None
    ) -> Tensor:
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, masks[self.window], causal=True, rotary=rotary, cache=cache)
        y, x = add_and_norm(self.mlp_norm, self.attention_dropout, y, x)
        return self.mlp_dropout(self.mlp(y), x)


class Phi3Backbone(LlamaBackbone):
    """Phi-3 without a head."""

    block_class: Any = Phi3Block


class Phi3ForCausalLM(Phi3Backbone, LlamaForCausalLM, GenerationMixin):
    """Phi-3 that predicts the next token."""


class Phi3Model(Phi3Backbone, LlamaModel):
    """Phi-3 without a head."""


class Phi3ForSequenceClassification(Phi3Backbone, LlamaForSequenceClassification):
    """Phi-3 that classifies a text."""


class Phi3ForTokenClassification(Phi3Backbone, LlamaForTokenClassification):
    """Phi-3 that classifies each token."""
