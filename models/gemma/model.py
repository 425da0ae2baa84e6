"""Gemma (Gemma Team, 2024, "Gemma: Open Models Based on Gemini Research and Technology",
arXiv:2403.08295), a decoder like Llama.

- the norms multiply by 1 + weight in fp32, and their initial weights are 0
- the embeddings are multiplied by sqrt(H), which is rounded to their dtype
- the heads' features need not add up to H; GeGLU with the approximated GELU
- the output head is the word embedding

Its successors differ by constants of their configurations, and by a cap of their logits:

- Gemma 2: norms of the outputs too, windows in each second layer, capped scores and logits
- Gemma 3: windows in five of six layers, which rotate by other frequencies; norms of queries and
  keys
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...mpu import VocabParallelEmbedding
from ..generation.mixin import GenerationMixin
from ..llama.model import (
    LlamaBackbone,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)


class GemmaWordEmbedding(VocabParallelEmbedding):
    """A word embedding whose rows are multiplied by sqrt(H) when it is called.

    A program calls it for the embeddings that it gives to the model. The model looks up rows by
    `embed`, and multiplies them too.
    """

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale(super().forward(ids))

    def scale(self, x: Tensor) -> Tensor:
        """Returns x [..., H] times sqrt(H) in the dtype of x."""
        factor = self.embedding_dim**0.5
        return x * torch.full((), factor, dtype=x.dtype, device=x.device)


class GemmaBackbone(LlamaBackbone):
    """Gemma, or a successor, without a head."""

    embedding_class: Any = GemmaWordEmbedding

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x, table = super().embed(input_ids)
        if input_ids.is_floating_point():  # the caller has scaled the embeddings that it gives
            return x, table
        return cast(GemmaWordEmbedding, self.word_embeddings).scale(x), table


class GemmaForCausalLM(GemmaBackbone, LlamaForCausalLM, GenerationMixin):
    """Gemma that predicts the next token."""


class GemmaModel(GemmaBackbone, LlamaModel):
    """Gemma without a head."""


class GemmaForSequenceClassification(GemmaBackbone, LlamaForSequenceClassification):
    """Gemma that classifies a text."""


class GemmaForTokenClassification(GemmaBackbone, LlamaForTokenClassification):
    """Gemma that classifies each token."""
