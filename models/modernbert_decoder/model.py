"""ModernBERT's decoder (Weller et al., 2025, "Seq vs Seq: An Open Suite of Paired Encoders and
Decoders", arXiv:2507.11412), which Ettin's decoders are.

It is a ModernBERT whose tokens attend to earlier tokens (see `models/modernbert/model.py`).

- the files have a matrix each for queries, keys and values
- the classifier takes the last token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.cache import Cache, LayerKVCache
from ..blocks.documents import Documents
from ..blocks.masks import causal_mask, find_pieces, restart_positions, window_mask
from ..blocks.residual import add_and_norm
from ..blocks.rotary import Rotary, rotary_embedding
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, SequenceClassification
from ..language_model import MaskedHeadCausalLM
from ..modernbert.heads import Transform
from ..modernbert.model import ModernBertBackbone, ModernBertBlock
from ..outputs import BackboneOutput, StageOutput
from .config import ModernBertDecoderConfig


class ModernBertDecoderBlock(ModernBertBlock):
    """A block of ModernBERT that attends to earlier positions."""

    def compute(
        self,
        x: Tensor,
        mask: Tensor | Documents | None,
        rotary: Rotary,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        y = x
        if self.attention_norm is not None:
            y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, mask, causal=True, rotary=rotary, cache=cache)
        y, x = add_and_norm(self.mlp_norm, self.attention_dropout, y, x)
        return x + self.mlp(y)


class ModernBertDecoderBackbone(ModernBertBackbone):
    """The embeddings and blocks. With `mesh=None` the model is not split."""

    positional_inputs = (
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "inputs_embeds",
    )
    config: ModernBertDecoderConfig  # type: ignore[assignment] - with causal windows
    block_class: Any = ModernBertDecoderBlock

    def run_backbone(  # type: ignore[override] - a decoder has a cache
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks. The arguments are those of `LlamaBackbone.run_backbone`."""
        config = self.config
        length = input_ids.shape[1]
        cached = 0 if cache is None else cache.length
        pieces = find_pieces(seq_idx, position_ids, attention_mask, cache is not None)
        if position_ids is None and pieces is not None:
            position_ids = restart_positions(pieces)
        if position_ids is None:
            position_ids = torch.arange(cached, cached + length, device=input_ids.device)[None]
        near = window_mask(
            attention_mask,
            length,
            cached,
            config.window,
            causal=True,
            device=input_ids.device,
            pieces=pieces,
        )
        whole = causal_mask(attention_mask, length, pieces)
        masks = {"full_attention": whole, "sliding_attention": near}
        rotary: dict[str, Rotary] = {}
        for kind, rope in config.rope.items():
            rotary[kind] = rotary_embedding(
                position_ids,
                config.head_size,
                rope,
                config.max_position_embeddings,
                self.dtype,
                mesh=self.mesh,
            )

        def block_arguments(
            layer: int,
        ) -> tuple[Tensor | Documents | None, Rotary, LayerKVCache | None]:
            kind = config.attention_types[layer]
            return masks[kind], rotary[kind], cache and cache.layers[layer]

        return self.run_stack(
            self.blocks,
            embed=lambda: self.embed(input_ids),
            block_arguments=block_arguments,
            final_norm=self.final_norm,
        )


class ModernBertDecoderForCausalLM(MaskedHeadCausalLM, ModernBertDecoderBackbone, GenerationMixin):
    """ModernBERT's decoder that predicts the next token."""


class ModernBertDecoderModel(BareModel, ModernBertDecoderBackbone):
    """ModernBERT's decoder without a head."""


class ModernBertDecoderForSequenceClassification(SequenceClassification, ModernBertDecoderBackbone):
    """ModernBERT's decoder that classifies a text."""

    pooling = "last"
    dropout_rate = "classifier_dropout"

    def add_head(self) -> None:
        super().add_head()
        self.transform = Transform(self.config)
        bias = self.config.classifier_bias
        self.classifier = nn.Linear(self.hidden_size, self.num_outputs, bias=bias)

    def score(self, x: Tensor) -> Tensor:
        return super().score(self.transform(x))
