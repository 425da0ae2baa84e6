"""DeBERTa-v2 and v3 (He et al., 2020, arXiv:2006.03654; He et al., 2021, "DeBERTaV3: Improving
DeBERTa using ELECTRA-Style Pre-Training with Gradient-Disentangled Embedding Sharing",
arXiv:2111.09543), a BERT with these differences:

- disentangled attention: the scores have terms of relative positions (`attention.py`), whose
  embeddings all layers share
- mostly no learned positions at the input, and no segments
- the embeddings of padding are 0
- the classifier's dense layer has a GELU
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...mpu import Dropout, LayerNorm, ParallelMesh, context_size, cut_sequence, scatter_sequence
from ..bert.model import BertBackbone, BertBlock, BertEncoder
from ..blocks.embeddings import embed_tokens
from ..blocks.masks import key_mask
from ..blocks.residual import add_and_norm
from ..heads import (
    BareModel,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)
from ..language_model import MaskedLM
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig
from .attention import DisentangledAttention, RelativePositions, find_relative_positions
from .config import DebertaV2Config


class DebertaV2Block(BertBlock):
    """A block of BERT with disentangled attention."""

    def __init__(
        self, config: DebertaV2Config, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.attention: Any = DisentangledAttention(config, mesh, parallel_config)
        self.position_dropout = Dropout(config.hidden_dropout_prob, mesh=mesh)

    def compute(  # type: ignore[override] - it attends to no encoder
        self, x: Tensor, mask: Tensor | None, relative: RelativePositions | None
    ) -> Tensor:
        if relative is not None:
            dropped = self.position_dropout(relative.embeddings)
            relative = relative._replace(embeddings=dropped)
        y = self.attention(x, mask, relative)
        x, _ = add_and_norm(self.attention_norm, self.attention_dropout, y, x)
        return add_and_norm(self.mlp_norm, self.mlp_dropout, self.mlp(x), x)[0]


class DebertaV2Encoder(BertEncoder):
    """The embeddings and blocks, without a head.

    Attributes:
        relative_embeddings: [R, H], of relative positions.
    """

    block_class: Any = DebertaV2Block
    shared_by_blocks = ("relative_embeddings", "relative_norm")

    def __init__(
        self, config: DebertaV2Config, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        if context_size(mesh) > 1:
            raise ValueError(
                "disentangled attention does not split sequences: use context_parallel_size=1"
            )
        super().__init__(config, mesh, parallel_config)
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        if not config.position_biased_input:
            del self.position_embeddings
        self.relative_embeddings: nn.Parameter | None = None
        self.relative_norm: LayerNorm | None = None
        if config.relative_attention:
            shape = (2 * config.position_span, config.hidden_size)
            self.relative_embeddings = nn.Parameter(torch.empty(shape))
            if config.norms_positions:
                self.relative_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def embed_sequence(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the
        table for a head.
        """
        x, table = embed_tokens(self.word_embeddings, input_ids)
        length = input_ids.shape[1]
        if cast(DebertaV2Config, self.config).position_biased_input:
            if position_ids is None:
                position_ids = self.default_position_ids(input_ids)
            x = x + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, length, dtype=torch.long, device=input_ids.device)
            x = x + self.token_type_embeddings(token_type_ids)
        x = self.embedding_norm(x)
        if attention_mask is not None:
            tokens = cut_sequence(attention_mask[..., None], self.mesh)
            if self.sequence_parallel:
                tokens = scatter_sequence(tokens, self.mesh)
            x = x * tokens.to(x.dtype)
        return self.embedding_dropout(x), table

    def find_relative(self, length: int) -> RelativePositions | None:
        """Returns the relative positions of sequences of a length, if scores depend on them."""
        if self.relative_embeddings is None:
            return None
        embeddings: Tensor = self.relative_embeddings
        if self.relative_norm is not None:
            embeddings = self.relative_norm(embeddings)
        config = cast(DebertaV2Config, self.config)
        return find_relative_positions(embeddings[None], length, config)


class DebertaV2Backbone(BertBackbone):
    """The encoder. With `mesh=None` the model is not split."""

    encoder_class: Any = DebertaV2Encoder

    def run_backbone(  # type: ignore[override] - it attends to no encoder
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the blocks: every token attends to all but padding.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], 0 for padding.
            token_type_ids, position_ids: int64 [B, S].
        """
        encoder = cast(DebertaV2Encoder, self.encoder)
        mask = key_mask(attention_mask)
        relative = encoder.find_relative(input_ids.shape[1])
        return self.run_stack(
            encoder.blocks,
            embed=lambda: encoder.embed_sequence(
                input_ids, attention_mask, token_type_ids, position_ids
            ),
            block_arguments=lambda layer: (mask, relative),
        )


class Pooled(SequenceClassification):
    """A classifier whose dense layer has the configured activation and a dropout of its own."""

    dense_name = "pooler"
    drops_input = True

    def add_head(self) -> None:
        super().add_head()
        self.activation = self.config.pooler_hidden_act
        self.input_dropout = Dropout(self.config.pooler_dropout)


class DebertaV2Model(BareModel, DebertaV2Backbone):
    """DeBERTa-v2 without a head."""

    pooler_name = None


class DebertaV2ForMaskedLM(MaskedLM, DebertaV2Backbone):
    """DeBERTa-v2 that predicts masked tokens."""


class DebertaV2ForSequenceClassification(Pooled, DebertaV2Backbone):
    """DeBERTa-v2 that classifies a text."""


class DebertaV2ForTokenClassification(TokenClassification, DebertaV2Backbone):
    """DeBERTa-v2 that classifies each token."""

    dropout_rate = "hidden_dropout_prob"


class DebertaV2ForMultipleChoice(Pooled, MultipleChoice, DebertaV2Backbone):
    """DeBERTa-v2 that chooses one of several texts."""


class DebertaV2ForQuestionAnswering(QuestionAnswering, DebertaV2Backbone):
    """DeBERTa-v2 that finds the first and the last token of an answer."""
