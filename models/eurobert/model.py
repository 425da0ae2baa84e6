"""EuroBERT (Boizard et al., 2025, "EuroBERT: Scaling Multilingual Encoders for European Languages",
arXiv:2503.05500).

It is a Llama whose tokens attend to all tokens (see `models/llama/model.py`).

- the head of the language model is a matrix alone, without a dense layer
- the classifier begins with a dense layer and GELU, behind which or before which tokens are averaged
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import VocabParallelHead
from ..blocks.activation_functions import find_activation
from ..blocks.documents import Documents
from ..blocks.masks import key_mask, restart_positions
from ..blocks.rotary import Rotary, rotary_embedding
from ..heads import BareModel, SequenceClassification, TokenClassification, average_tokens
from ..language_model import MaskedLM
from ..llama.model import LlamaBackbone, LlamaBlock
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import layer_arguments
from .config import EuroBertConfig


class EuroBertBlock(LlamaBlock):
    """A block of Llama that attends to all tokens."""

    def compute(  # type: ignore[override] - an encoder has no cache
        self, x: Tensor, mask: Tensor | Documents | None, rotary: Rotary
    ) -> Tensor:
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, mask, rotary=rotary)
        y, x = self.mlp_norm(y, x, return_residual=True)
        return x + self.mlp(y)


class EuroBertHead(nn.Module):
    """Multiplies states by a matrix of the vocabulary's size, or by the word embedding."""

    def __init__(self, backbone: EuroBertBackbone) -> None:
        super().__init__()
        config = backbone.config
        embedding = backbone.embedding
        self.decoder = VocabParallelHead(
            config.hidden_size,
            config.vocab_size,
            bias=config.mlp_bias,
            tied=embedding if config.tie_word_embeddings else None,
            pad_multiple=embedding.shard.pad_multiple,
            **layer_arguments(backbone.mesh, backbone.parallel_config),
        )

    def transform(self, x: Tensor) -> Tensor:
        """Returns the input of `decoder`: x."""
        return x


class EuroBertBackbone(LlamaBackbone):
    """The embeddings and blocks. With `mesh=None` the model is not split."""

    config: EuroBertConfig  # type: ignore[assignment] - Llama's with a pooling
    positional_inputs = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
    block_class: Any = EuroBertBlock

    def run_backbone(  # type: ignore[override] - an encoder has no cache
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], 0 for padding.
            position_ids: int64 [B, S].
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows, which
                attends to itself alone.
        """
        config = self.config
        if position_ids is None and seq_idx is not None:
            position_ids = restart_positions(seq_idx)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        rotary = rotary_embedding(
            position_ids,
            config.head_size,
            config.rope,
            config.max_position_embeddings,
            self.dtype,
            mesh=self.mesh,
        )
        mask = key_mask(attention_mask, seq_idx)
        return self.run_stack(
            self.blocks,
            embed=lambda: self.embed(input_ids),
            block_arguments=lambda layer: (mask, rotary),
            final_norm=self.final_norm,
        )

    def masked_lm_head(self) -> EuroBertHead:
        return EuroBertHead(self)


class EuroBertForMaskedLM(MaskedLM, EuroBertBackbone):
    """EuroBERT that predicts masked tokens."""


class EuroBertModel(BareModel, EuroBertBackbone):
    """EuroBERT without a head."""


class EuroBertForSequenceClassification(SequenceClassification, EuroBertBackbone):
    """EuroBERT that classifies a text."""

    dense_name = "dense"
    activation = "gelu"
    dropout_rate = None

    def add_head(self) -> None:
        super().add_head()
        is_first = self.config.classifier_pooling == "bos"
        self.pooling = "first" if is_first else "mean"

    def make_logits(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.config.classifier_pooling != "late":
            return super().make_logits(x, input_ids, attention_mask)
        x = self.get_submodule("dense")(self.gather_hidden_states(x))  # [B, S, H]
        x = find_activation(self.activation)(x)
        return self.score(average_tokens(x, attention_mask))


class EuroBertForTokenClassification(TokenClassification, EuroBertBackbone):
    """EuroBERT that classifies each token."""

    dropout_rate = None
