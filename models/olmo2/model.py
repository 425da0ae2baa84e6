"""OLMo 2 (OLMo Team, 2024, "2 OLMo 2 Furious", arXiv:2501.00656), a decoder like Llama (see
`models/llama/model.py`).

- norms of the outputs of attention and MLP, not of their inputs
- norms of the queries, and of the keys, of all heads together
- the norms round once, after they multiply by their weights
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blocks.cache import LayerKVCache
from ..blocks.rotary import Rotary
from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaBackbone,
    LlamaBlock,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    Masks,
)


class Olmo2Block(LlamaBlock):
    """A block of Llama whose norms follow attention and MLP."""

    def compute(
        self, x: Tensor, masks: Masks, rotary: Rotary, cache: LayerKVCache | None = None
    ) -> Tensor:
        y = self.attention(x, masks[self.window], causal=True, rotary=rotary, cache=cache)
        x = x + self.attention_output_norm(y)
        return x + self.mlp_output_norm(self.mlp(x))


class Olmo2Backbone(LlamaBackbone):
    """OLMo 2 without a head."""

    block_class: Any = Olmo2Block


class Olmo2ForCausalLM(Olmo2Backbone, LlamaForCausalLM, GenerationMixin):
    """OLMo 2 that predicts the next token."""


class Olmo2Model(Olmo2Backbone, LlamaModel):
    """OLMo 2 without a head."""


class Olmo2ForSequenceClassification(Olmo2Backbone, LlamaForSequenceClassification):
    """OLMo 2 that classifies a text."""
