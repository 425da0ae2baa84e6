"""Granite 3 (IBM, 2024): Llama with four constants.

- the embeddings are multiplied by `embedding_multiplier`
- the scores are multiplied by `attention_multiplier`, instead of 1 / sqrt(head size)
- the outputs of attention and MLP are multiplied by `residual_multiplier`, then added
- the logits are divided by `logits_scaling`
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ...mpu import ParallelMesh
from ..blocks.cache import LayerKVCache
from ..blocks.rotary import Rotary
from ..generation.mixin import GenerationMixin
from ..llama.model import LlamaBackbone, LlamaBlock, LlamaForCausalLM, LlamaModel, Masks
from ..parallel_config import ParallelConfig
from .config import GraniteConfig


class GraniteBlock(LlamaBlock):
    """A block of Llama whose branches are scaled before they are added."""

    def __init__(
        self,
        config: GraniteConfig,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__(config, layer, mesh, parallel_config)
        self.multiplier = config.residual_multiplier

    def compute(
        self, x: Tensor, masks: Masks, rotary: Rotary, cache: LayerKVCache | None = None
    ) -> Tensor:
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, masks[self.window], causal=True, rotary=rotary, cache=cache)
        y, x = self.mlp_norm(y * self.multiplier, x, return_residual=True)
        return x + self.mlp(y) * self.multiplier


class GraniteBackbone(LlamaBackbone):
    """Granite without a head."""

    block_class: Any = GraniteBlock

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x, table = super().embed(input_ids)
        return x * cast(GraniteConfig, self.config).embedding_multiplier, table


class GraniteForCausalLM(GraniteBackbone, LlamaForCausalLM, GenerationMixin):
    """Granite that predicts the next token."""

    def head_input(self, x: Tensor) -> Tensor:
        """Returns x [B, S, H] divided by `logits_scaling`, so that the logits are."""
        return x / cast(GraniteConfig, self.config).logits_scaling


class GraniteModel(GraniteBackbone, LlamaModel):
    """Granite without a head."""
