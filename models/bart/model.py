"""BART (Lewis et al., 2020, "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language
Generation, ...").

- encoder and decoder share the word embedding, which is also the output head, unless the
  configuration unties all of them; each has its own learned positions
- the sum of both embeddings is normalized; mBART and M2M100 may multiply the word embeddings by √H
  first
- post-LayerNorm blocks: norm(x + attention(x)), in the decoder norm(x + cross_attention(x)), norm(x
  + mlp(x))
- mBART and M2M100: pre-LayerNorm blocks, x + attention(norm(x)), and a final norm after each stack
- M2M100 and NLLB: sinusoidal positions that skip padding, and no norm of the embeddings
- Pegasus and Marian: sinusoidal positions that count padding, and no norm of the embeddings; Pegasus
  with pre-LayerNorm
- biases everywhere; exact GELU, in M2M100 ReLU
- initial weights N(0, 0.02); the padding token's embedding and all biases zero
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...mpu import Dropout, LayerNorm, ParallelMesh, VocabParallelEmbedding
from ..backbone import Backbone
from ..blocks.attention import CrossAttention, SelfAttention
from ..blocks.cache import LayerKVCache
from ..blocks.mlp import MLP
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.stack import Block, BlockList
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, QuestionAnswering, SequenceClassification
from ..language_model import VOCABULARY_MULTIPLE, vocabulary_head
from ..parallel_config import ParallelConfig, layer_arguments
from ..seq2seq import SEQ2SEQ_INPUTS, EncoderBackbone, Seq2SeqBackbone, Seq2SeqLM, Seq2SeqStack
from .config import BartConfig
from .positions import LearnedPositions, PlacePositions, SinusoidalPositions


class BartBlock(Block):
    """One layer of the encoder or of the decoder.

    The decoder also attends to the encoder's output.
    """

    def __init__(
        self,
        config: BartConfig,
        is_decoder: bool,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        size = config.d_model
        shared = layer_arguments(mesh, parallel_config)
        heads = config.decoder_attention_heads if is_decoder else config.encoder_attention_heads
        block: dict[str, Any] = {"mesh": mesh, "parallel_config": parallel_config}
        attention: dict[str, Any] = {
            "scale": (size // heads) ** -0.5,
            "dropout": config.attention_dropout,
            **block,
        }
        self.is_decoder = is_decoder
        self.pre_norm = config.pre_norm
        self.attention = SelfAttention(size, heads, **attention)
        self.attention_dropout = residual_dropout(config.dropout, mesh, parallel_config)
        self.attention_norm = LayerNorm(size, **shared)
        if is_decoder:
            self.cross_attention = CrossAttention(size, heads, **attention)
            self.cross_attention_dropout = residual_dropout(config.dropout, mesh, parallel_config)
            self.cross_attention_norm = LayerNorm(size, **shared)
        self.mlp = self.build_mlp(config, is_decoder, layer, **block)
        self.mlp_dropout = residual_dropout(config.mlp_dropout, mesh, parallel_config)
        self.mlp_norm = LayerNorm(size, **shared)

    def build_mlp(self, config: Any, is_decoder: bool, layer: int, **arguments: Any) -> nn.Module:
        """Returns the feed-forward part of a layer, from how it is split."""
        return MLP(
            config.d_model,
            config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim,
            config.activation_function,
            dropout=config.activation_dropout,
            **arguments,
        )

    def bind_mlp(self, mask: Any) -> Callable[[Tensor], Tensor]:
        """Returns the feed-forward part as a function of [B, S, H], for a call with this mask."""
        return self.mlp

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
            source: The encoder's output [B, T, H]. For the other arguments see `SelfAttention` and
                `CrossAttention`.
        """
        attention = partial(self.attention, mask=mask, causal=self.is_decoder, cache=cache)
        layers: list[tuple[LayerNorm, Callable[[Tensor], Tensor], Dropout]]
        layers = [(self.attention_norm, attention, self.attention_dropout)]
        if source is not None:
            cross_attention = partial(
                self.cross_attention, source=source, mask=source_mask, cache=source_cache
            )
            layers.append(
                (self.cross_attention_norm, cross_attention, self.cross_attention_dropout)
            )
        layers.append((self.mlp_norm, self.bind_mlp(mask), self.mlp_dropout))
        if not self.pre_norm:
            for norm, layer, dropout in layers:
                x, _ = add_and_norm(norm, dropout, layer(x), x)
            return x
        # The norm before a layer also adds the dropped-out output of the layer before it.
        norm, layer, dropout = layers[0]
        y, x = norm(x, return_residual=True)
        for next_norm, next_layer, next_dropout in layers[1:]:
            y, x = add_and_norm(next_norm, dropout, layer(y), x)
            layer = next_layer
            dropout = next_dropout
        return dropout(layer(y), x)


class ScaledWordEmbedding(VocabParallelEmbedding):
    """A word embedding whose result is multiplied by a factor when it is called.

    A program calls it for the embeddings that it gives to the model. The stacks look up rows by
    `embed` and multiply them by the same factor.
    """

    scale: float = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


def build_word_embedding(
    config: BartConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
) -> ScaledWordEmbedding:
    """Returns a word embedding of a BART."""
    embedding = ScaledWordEmbedding(
        config.vocab_size,
        config.d_model,
        padding_idx=config.padding_idx,
        pad_multiple=VOCABULARY_MULTIPLE,
        **layer_arguments(mesh, parallel_config),
    )
    embedding.scale = find_scale(config)
    return embedding


def find_scale(config: BartConfig) -> float:
    """Returns what the word embeddings are multiplied by."""
    return math.sqrt(config.d_model) if config.scale_embedding else 1.0


class BartStack(Seq2SeqStack):
    """The encoder or the decoder: positions, blocks and, with pre-LayerNorm, a final norm."""

    block_class: ClassVar[type[BartBlock]] = BartBlock

    def __init__(
        self,
        config: BartConfig,
        is_decoder: bool,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        size = config.d_model
        shared = layer_arguments(mesh, parallel_config)
        self.layerdrop = config.decoder_layerdrop if is_decoder else config.encoder_layerdrop
        self.scale = find_scale(config)
        if config.has_own_embeddings:
            self.word_embeddings = build_word_embedding(config, mesh, parallel_config)
        if config.learned_positions:
            self.position_embeddings = LearnedPositions(
                config.max_position_embeddings, size, **shared
            )
        elif config.positions_count_padding:
            self.position_embeddings = PlacePositions(
                config.max_position_embeddings, size, **shared
            )
        else:
            assert config.pad_token_id is not None  # The configuration has checked it.
            self.position_embeddings = SinusoidalPositions(size, config.pad_token_id, **shared)
        self.embedding_norm = LayerNorm(size, **shared) if config.embedding_norm else nn.Identity()
        self.embedding_dropout = residual_dropout(config.dropout, mesh, parallel_config)
        layers = config.decoder_layers if is_decoder else config.encoder_layers
        self.blocks = BlockList(
            (
                self.block_class(config, is_decoder, layer, mesh, parallel_config)
                for layer in range(layers)
            ),
            parallel_config,
        )
        self.final_norm = LayerNorm(size, **shared) if config.pre_norm else nn.Identity()

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        if self.training and self.layerdrop:
            raise ValueError(
                f"training with a layer drop of {self.layerdrop} is unsupported: which blocks it "
                "drops would depend on the layout; set encoder_layerdrop and decoder_layerdrop to "
                "0 in config.json"
            )
        positions = self.position_embeddings.embed(ids, cached, words.dtype, pieces)
        if not ids.is_floating_point():  # the caller has scaled the embeddings that it gives
            words = words * self.scale
        return self.embedding_dropout(self.embedding_norm(words + positions))

    def finish(self, x: Tensor) -> Tensor:
        return self.final_norm(x)


class BartEmbeddings(Backbone):
    """The word embedding and the initial weights. With `mesh=None` the model is not split."""

    config: BartConfig

    def __init__(
        self,
        config: BartConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config or ParallelConfig()
        self.word_embeddings = build_word_embedding(config, mesh, self.parallel_config)
        if config.has_own_embeddings:
            # No stack uses the shared embedding then; it is there for the files.
            self.word_embeddings.weight.requires_grad = False

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith("bias"):
            full.zero_()
        elif "norm" in name:
            full.fill_(1.0)
        else:
            full.normal_(0.0, self.config.init_std, generator=generator)
            if name.endswith("word_embeddings.weight"):
                full[self.config.padding_idx].zero_()


class BartEncoderBackbone(EncoderBackbone, BartEmbeddings):
    """The encoder without a head."""

    def __init__(
        self,
        config: BartConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.encoder = BartStack(config, False, mesh, self.parallel_config)


class BartBackbone(Seq2SeqBackbone, BartEmbeddings):
    """Encoder and decoder without a head."""

    stack_class: ClassVar[type[BartStack]] = BartStack

    def __init__(
        self,
        config: BartConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.encoder = self.stack_class(config, False, mesh, self.parallel_config)
        self.decoder = self.stack_class(config, True, mesh, self.parallel_config)


class BartLM(Seq2SeqLM):
    """Predicts the label at each position of the decoder; the logits may have a stored bias."""

    def add_head(self) -> None:
        self.head = vocabulary_head(self, fixed_bias=self.config.final_logits_bias)


class BartForConditionalGeneration(BartLM, BartBackbone, GenerationMixin):
    """BART that answers a text with another one."""


class BartModel(BareModel, BartBackbone):
    """BART without a head."""


class BartForSequenceClassification(SequenceClassification, BartBackbone):
    """BART that classifies a text."""

    positional_inputs = (*SEQ2SEQ_INPUTS, "inputs_embeds", "decoder_inputs_embeds")
    pooling = "eos"
    dense_name = "pooler"
    dropout_rate = "classifier_dropout"
    drops_input = True


class BartForQuestionAnswering(QuestionAnswering, BartBackbone):
    """BART that finds the first and the last token of an answer."""

    positional_inputs = SEQ2SEQ_INPUTS


class BartEncoder(BareModel, BartEncoderBackbone):
    """The encoder of BART without a head."""
