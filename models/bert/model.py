"""BERT (Devlin et al., 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding").

- word, position and segment embeddings, added and normalized
- post-LayerNorm blocks: norm(x + attention(x)), then norm(x + mlp(x)); every token attends to all
  but padding
- fused qkv with biases, exact GELU
- masked-language-model head: a replicated dense layer and norm, then the word embedding and a
  separate bias, both split over the vocabulary
- a tanh layer pools the first token's state to represent the sequence, for next-sentence prediction
  and classification
- initial weights N(0, 0.02); the padding token's embedding and all biases zero
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...mpu import LayerNorm, ParallelMesh, VocabParallelEmbedding
from ..backbone import Backbone
from ..blocks.attention import CrossAttention, SelfAttention
from ..blocks.cache import Cache, LayerKVCache
from ..blocks.embeddings import PositionEmbedding, check_positions, embed_tokens
from ..blocks.linear import ReplicatedLinear
from ..blocks.masks import causal_mask, find_pieces, key_mask, restart_positions
from ..blocks.mlp import MLP
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.stack import Block, BlockList
from ..generation.mixin import GenerationMixin
from ..heads import (
    BareModel,
    MultipleChoice,
    NextSentencePrediction,
    PreTraining,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
)
from ..language_model import VOCABULARY_MULTIPLE, MaskedHeadCausalLM, MaskedLM, MaskedLMHead
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig, layer_arguments
from .config import BertConfig


class BertBlock(Block):
    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.layer_norm_eps
        heads = config.num_attention_heads
        shared = layer_arguments(mesh, parallel_config)
        self.attention = SelfAttention(
            size,
            heads,
            scale=(size // heads) ** -0.5,
            dropout=config.attention_probs_dropout_prob,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        self.attention_dropout = residual_dropout(config.hidden_dropout_prob, mesh, parallel_config)
        self.attention_norm = LayerNorm(size, eps, **shared)
        self.is_decoder = config.is_decoder
        if config.add_cross_attention:
            self.cross_attention = CrossAttention(
                size,
                heads,
                scale=(size // heads) ** -0.5,
                dropout=config.attention_probs_dropout_prob,
                mesh=mesh,
                parallel_config=parallel_config,
            )
            self.cross_attention_dropout = residual_dropout(
                config.hidden_dropout_prob, mesh, parallel_config
            )
            self.cross_attention_norm = LayerNorm(size, eps, **shared)
        self.mlp = MLP(
            size,
            config.intermediate_size,
            config.hidden_act,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        self.mlp_dropout = residual_dropout(config.hidden_dropout_prob, mesh, parallel_config)
        self.mlp_norm = LayerNorm(size, eps, **shared)

    def compute(
        self,
        x: Tensor,
        mask: Tensor | None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: LayerKVCache | None = None,
        source_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            source: An encoder's output [B, T, H], for a decoder. For the other arguments see
                `SelfAttention` and `CrossAttention`.
        """
        y = self.attention(x, mask, causal=self.is_decoder, cache=cache)
        x, _ = add_and_norm(self.attention_norm, self.attention_dropout, y, x)
        if source is not None:
            y = self.cross_attention(x, source, source_mask, source_cache)
            x, _ = add_and_norm(self.cross_attention_norm, self.cross_attention_dropout, y, x)
        return add_and_norm(self.mlp_norm, self.mlp_dropout, self.mlp(x), x)[0]


class BertEncoder(nn.Module):
    """The embeddings and blocks, without a head."""

    block_class: ClassVar[type[BertBlock]] = BertBlock

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__()
        self.config = config
        self.max_sequence_length = config.max_sequence_length
        # As in transformers, it is built in: the configuration's may be changed later.
        self.pad_token_id = config.pad_token_id
        size = config.embedding_width
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            size,
            padding_idx=config.padding_idx,
            pad_multiple=VOCABULARY_MULTIPLE,
            **shared,
        )
        self.position_embeddings = PositionEmbedding(
            config.max_position_embeddings, size, padding_idx=config.position_padding_idx, **shared
        )
        self.token_type_embeddings = None
        if config.has_segments:
            self.token_type_embeddings = PositionEmbedding(config.type_vocab_size, size, **shared)
        self.embedding_norm: nn.Module = LayerNorm(size, config.layer_norm_eps, **shared)
        self.embedding_dropout = residual_dropout(config.hidden_dropout_prob, mesh, parallel_config)
        self.projection = nn.Identity()
        if size != config.hidden_size:
            self.projection = ReplicatedLinear(size, config.hidden_size, **shared)
        layers = range(config.num_hidden_layers)
        self.blocks = BlockList(
            (self.block_class(config, mesh, parallel_config) for _ in layers), parallel_config
        )
        self.final_norm: nn.Module | None = None

    def embed(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        seq_idx: Tensor | None = None,
        cached: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the
        table for a head.
        """
        if position_ids is None:
            position_ids = self.default_position_ids(input_ids, seq_idx, cached)
        x, table = embed_tokens(self.word_embeddings, input_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                length = input_ids.shape[1]
                token_type_ids = torch.zeros(1, length, dtype=torch.long, device=input_ids.device)
            x = x + self.token_type_embeddings(token_type_ids)
        x = self.embedding_dropout(self.embedding_norm(x + self.position_embeddings(position_ids)))
        return self.projection(x), table

    def default_position_ids(
        self, input_ids: Tensor, seq_idx: Tensor | None = None, cached: int = 0
    ) -> Tensor:
        """Returns position ids, int64 [1, S], or [B, S] if padding has a separate position.

        In that case the other tokens are counted from the padding position, wherever the padding
        is: cumsum(token is not padding) + padding position, as in fairseq and transformers. Each
        piece of a packed row is counted from the beginning; see `BertBackbone.run_backbone`. A
        decoder counts on after the `cached` positions.

        Raises:
            ValueError: There are more tokens than positions.
        """
        length = input_ids.shape[1]
        most = self.max_sequence_length
        padding = self.config.position_padding_idx
        if seq_idx is None:
            check_positions(None, cached + length, most)
        if padding is None:
            if seq_idx is None:
                return torch.arange(cached, cached + length, device=input_ids.device)[None]
            positions = restart_positions(seq_idx)
            check_positions(positions, 0, most)
            return positions
        if input_ids.is_floating_point():
            # Of embeddings nobody knows which are padding.
            is_token = torch.ones_like(input_ids[..., 0], dtype=torch.bool)
        else:
            is_token = input_ids != self.pad_token_id
        if seq_idx is None:
            return (is_token.cumsum(1) + cached) * is_token + padding
        positions = restart_positions(seq_idx, is_token) * is_token
        check_positions(positions, 0, most)
        return (positions + 1) * is_token + padding


class BertBackbone(Backbone):
    """The encoder; with `config.is_decoder` a decoder, which may attend to an encoder's output. With
    `mesh=None` the model is not split.
    """

    positional_inputs = (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "position_ids",
        "inputs_embeds",
    )
    decoder_inputs = (*positional_inputs, "encoder_hidden_states", "encoder_attention_mask")
    """Those of an architecture that may be a decoder."""
    config: BertConfig
    encoder_class: ClassVar[type[BertEncoder]] = BertEncoder

    def __init__(
        self,
        config: BertConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config or ParallelConfig()
        self.encoder = self.encoder_class(config, mesh, self.parallel_config)

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.encoder.word_embeddings

    @property
    def attends_to_encoder(self) -> bool:
        return self.config.add_cross_attention

    @property
    def keeps_cache(self) -> bool:
        return self.config.is_decoder

    @property
    def blocks(self) -> BlockList:
        return self.encoder.blocks

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the blocks: every token attends to all, or with `config.is_decoder` to itself and to
        earlier ones.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], or [B, M + S] with a cache; 0 for padding.
            token_type_ids, position_ids: int64 [B, S].
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows, which
                attends to itself alone.
            encoder_hidden_states: [B, T, H], whole on each rank, which the blocks attend to.
            encoder_attention_mask: [B, T], 0 for padding.
            cache: The keys and values of M earlier positions; not supported under sequence
                parallelism.

        Raises:
            ValueError: The configuration has no `is_decoder`, or no `add_cross_attention`.
        """
        config = self.config
        if cache is not None and not config.is_decoder:
            raise ValueError(f"{type(self).__name__} has a cache only with is_decoder")
        if encoder_hidden_states is not None and not config.add_cross_attention:
            raise ValueError(
                f"{type(self).__name__} takes encoder_hidden_states only with add_cross_attention"
            )
        cached = 0 if cache is None else cache.length
        pieces = find_pieces(seq_idx, None, attention_mask, cache is not None)
        mask = key_mask(attention_mask, pieces)
        if config.is_decoder:
            mask = causal_mask(attention_mask, input_ids.shape[1], pieces)
        source = None
        if encoder_hidden_states is not None:
            source = self.scatter_hidden_states(encoder_hidden_states)
        source_mask = key_mask(encoder_attention_mask)

        def block_arguments(layer: int) -> tuple[Any, ...]:
            shared = (mask, source, source_mask)
            if cache is None:
                return shared
            source_cache = cache.sources[layer] if cache.sources else None
            return (*shared, cache.layers[layer], source_cache)

        return self.run_stack(
            self.encoder.blocks,
            embed=lambda: self.encoder.embed(
                input_ids, token_type_ids, position_ids, seq_idx, cached
            ),
            block_arguments=block_arguments,
            final_norm=self.encoder.final_norm,
        )

    def masked_lm_head(self) -> MaskedLMHead:
        config = self.config
        return MaskedLMHead(
            self.embedding,
            config.hidden_size,
            config.head_act,
            config.layer_norm_eps,
            layer_arguments(self.mesh, self.parallel_config),
            tied=config.tie_word_embeddings,
        )

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(".bias"):
            full.zero_()
        elif "norm" in name:
            full.fill_(1.0)
        else:
            full.normal_(0.0, self.config.initializer_range, generator=generator)
            if "word_embeddings" in name and self.config.padding_idx is not None:
                full[self.config.padding_idx].zero_()
            if "position_embeddings" in name and self.config.position_padding_idx is not None:
                full[self.config.position_padding_idx].zero_()


class BertModel(BareModel, BertBackbone):
    """BERT without a head."""

    positional_inputs = BertBackbone.decoder_inputs
    pooler_name = "pooler"


class BertForMaskedLM(MaskedLM, BertBackbone):
    """BERT that predicts masked tokens."""

    positional_inputs = BertBackbone.decoder_inputs


class BertLMHeadModel(MaskedHeadCausalLM, BertBackbone, GenerationMixin):
    """BERT that predicts the next token."""

    positional_inputs = BertBackbone.decoder_inputs


class BertForPreTraining(PreTraining, BertBackbone):
    """BERT that predicts masked tokens, and whether the second sentence follows the first."""


class BertForNextSentencePrediction(NextSentencePrediction, BertBackbone):
    """BERT that predicts whether the second sentence follows the first."""

    dense_name = "pooler"


class BertForSequenceClassification(SequenceClassification, BertBackbone):
    """BERT that classifies a text."""

    dense_name = "pooler"


class BertForTokenClassification(TokenClassification, BertBackbone):
    """BERT that classifies each token."""


class BertForMultipleChoice(MultipleChoice, BertBackbone):
    """BERT that chooses one of several texts."""

    dense_name = "pooler"


class BertForQuestionAnswering(QuestionAnswering, BertBackbone):
    """BERT that finds the first and the last token of an answer."""
