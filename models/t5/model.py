"""T5 (Raffel et al., 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer").

- encoder and decoder share the word embedding; the only positions are a relative bias on the
  attention scores, from one table for each stack, or in UMT5 one for each layer
- pre-RMSNorm blocks: x + attention(norm(x)), in the decoder x + cross_attention(norm(x)), x +
  mlp(norm(x)); each stack ends with a norm
- no biases; attention scores are not scaled; the heads' total width may differ from the hidden size
- v1.0: ReLU; the head is the word embedding, and its input is scaled by d_model^-0.5
- v1.1, mT5 and UMT5: gated tanh-GELU; the head is a separate matrix, and its input is not scaled
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, RMSNorm, VocabParallelEmbedding
from ..blocks.attention import CrossAttention, SelfAttention
from ..blocks.cache import LayerKVCache
from ..blocks.mlp import MLP, GatedMLP
from ..blocks.relative_bias import RelativeBias, distance_buckets
from ..blocks.residual import add_and_norm, clamp_fp16_overflow, residual_dropout
from ..blocks.stack import Block, BlockList
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, QuestionAnswering, SequenceClassification, TokenClassification
from ..language_model import VOCABULARY_MULTIPLE
from ..parallel_config import ParallelConfig, layer_arguments
from ..seq2seq import SEQ2SEQ_INPUTS, EncoderBackbone, Seq2SeqBackbone, Seq2SeqLM, Seq2SeqStack
from .config import T5Config


class T5Block(Block):
    """One layer of the encoder or of the decoder.

    The decoder also attends to the encoder's output.
    """

    def __init__(
        self,
        config: T5Config,
        is_decoder: bool,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        size = config.d_model
        heads = config.num_heads
        rate = config.dropout_rate
        eps = config.layer_norm_epsilon
        shared = layer_arguments(mesh, parallel_config)
        block: dict[str, Any] = {"dropout": rate, "mesh": mesh, "parallel_config": parallel_config}
        attention: dict[str, Any] = {"scale": 1.0, "qkv_bias": False, "output_bias": False, **block}
        self.is_decoder = is_decoder
        self.relative_bias = None
        if not config.shares_relative_bias:
            self.relative_bias = RelativeBias(
                num_heads=heads, **config.bucketing(is_decoder), mesh=mesh
            )
        self.attention_norm = RMSNorm(size, eps, **shared)
        self.attention = self.build_attention(config, is_decoder, **attention)
        self.attention_dropout = residual_dropout(rate, mesh, parallel_config)
        if is_decoder:
            self.cross_attention_norm = RMSNorm(size, eps, **shared)
            self.cross_attention = CrossAttention(size, heads, head_size=config.d_kv, **attention)
            self.cross_attention_dropout = residual_dropout(rate, mesh, parallel_config)
        self.mlp_norm = RMSNorm(size, eps, **shared)
        self.mlp = self.build_mlp(config, is_decoder, layer, **block)
        self.mlp_dropout = residual_dropout(rate, mesh, parallel_config)

    def build_attention(self, config: Any, is_decoder: bool, **arguments: Any) -> SelfAttention:
        """Returns the attention of a layer to its own stack."""
        return SelfAttention(config.d_model, config.num_heads, head_size=config.d_kv, **arguments)

    def build_mlp(self, config: Any, is_decoder: bool, layer: int, **arguments: Any) -> nn.Module:
        """Returns the feed-forward part of a layer, from what its dropout and split are."""
        if config.is_gated:
            return GatedMLP(config.d_model, config.d_ff, config.activation, **arguments)
        return MLP(config.d_model, config.d_ff, config.activation, bias=False, **arguments)

    def compute(
        self,
        x: Tensor,
        mask: Tensor | None,
        position: Tensor | tuple[int, int, Tensor],
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: LayerKVCache | None = None,
        source_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            position: The relative bias that the stack shares, or the arguments of the block's own.
            source: The encoder's output [B, T, H]. For the other arguments see `SelfAttention` and
                `CrossAttention`.
        """
        bias = position if self.relative_bias is None else self.relative_bias(*position)
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, mask, bias, causal=self.is_decoder, cache=cache)
        dropout = self.attention_dropout
        if source is not None:
            y, x = add_and_norm(self.cross_attention_norm, dropout, y, x, clamp_fp16=True)
            y = self.cross_attention(y, source, source_mask, source_cache)
            dropout = self.cross_attention_dropout
        y, x = add_and_norm(self.mlp_norm, dropout, y, x, clamp_fp16=True)
        return clamp_fp16_overflow(self.mlp_dropout(self.mlp(y), x))


class T5Stack(Seq2SeqStack):
    """The encoder or the decoder: blocks with relative biases, and a final norm."""

    shared_by_blocks = ("relative_bias",)
    block_class: ClassVar[type[T5Block]] = T5Block

    def __init__(
        self,
        config: T5Config,
        is_decoder: bool,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        self.bucketing = config.bucketing(is_decoder)
        self.relative_bias = None
        if config.shares_relative_bias:
            self.relative_bias = RelativeBias(
                num_heads=config.num_heads, **self.bucketing, mesh=mesh
            )
        self.embedding_dropout = residual_dropout(config.dropout_rate, mesh, parallel_config)
        layers = config.decoder_layers if is_decoder else config.num_layers
        self.blocks = BlockList(
            (
                self.block_class(config, is_decoder, layer, mesh, parallel_config)
                for layer in range(layers)
            ),
            parallel_config,
        )
        self.final_norm = RMSNorm(
            config.d_model, config.layer_norm_epsilon, **layer_arguments(mesh, parallel_config)
        )
        self.final_dropout = residual_dropout(config.dropout_rate, mesh, parallel_config)

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        return self.embedding_dropout(words)

    def shared_arguments(
        self, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> tuple[Any]:
        queries = ids.shape[1]
        keys = cached + queries
        if self.relative_bias is not None:
            # One number a head and distance [Np, M + S + S - 1], or each score [1, Np, S, M + S]; M is
            # the number of cached positions.
            return (self.relative_bias(queries, keys),)
        buckets = distance_buckets(queries, keys, ids.device, **self.bucketing)
        return ((queries, keys, buckets),)  # the arguments of each block's own bias

    def finish(self, x: Tensor) -> Tensor:
        return self.final_dropout(self.final_norm(x))


class T5EncoderBackbone(EncoderBackbone):
    """The encoder without a head. With `mesh=None` the model is not split."""

    config: Any  # a T5Config
    stack_class: ClassVar[type[T5Stack]] = T5Stack

    def __init__(
        self,
        config: T5Config,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config or ParallelConfig()
        shared = layer_arguments(mesh, self.parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, config.d_model, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )
        self.encoder = self.stack_class(config, False, mesh, self.parallel_config)

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place, with the standard deviations of the T5
        code base.
        """
        config = self.config
        factor = config.initializer_factor
        if name.endswith(".bias"):
            full.zero_()
            return
        if "norm" in name:
            full.fill_(factor)
            return
        full.normal_(0.0, factor, generator=generator)
        if name.endswith((".attention.output.weight", ".cross_attention.output.weight")):
            full *= (config.num_heads * config.d_kv) ** -0.5
        elif name.endswith(".down.weight"):
            full *= config.d_ff**-0.5
        elif name not in ("word_embeddings.weight", "token_classifier.weight"):
            full *= config.d_model**-0.5
        # The scores are not scaled, so the initial query weights, the first block of a fused qkv,
        # are smaller.
        if name.endswith(("attention.qkv.weight", "cross_attention.query.weight")):
            full[: config.num_heads * config.d_kv] *= config.d_kv**-0.5


class T5Backbone(Seq2SeqBackbone, T5EncoderBackbone):
    """Encoder and decoder without a head. With `mesh=None` the model is not split."""

    def __init__(
        self,
        config: T5Config,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.decoder = self.stack_class(config, True, mesh, self.parallel_config)

    def head_input(self, x: Tensor) -> Tensor:
        return x * self.config.d_model**-0.5 if self.config.scale_decoder_outputs else x


class T5ForConditionalGeneration(Seq2SeqLM, T5Backbone, GenerationMixin):
    """T5 that answers a text with another one.

    `forward` is `Seq2SeqLM.forward`, and `run_backbone` that of `Seq2SeqBackbone`.
    """


class T5Model(BareModel, T5Backbone):
    """T5 without a head."""


class T5ForSequenceClassification(SequenceClassification, T5Backbone):
    """T5 that classifies a text."""

    positional_inputs = (*SEQ2SEQ_INPUTS, "inputs_embeds", "decoder_inputs_embeds")
    pooling = "eos"
    dense_name = "pooler"
    dropout_rate = "classifier_dropout"
    drops_input = True


class T5ForQuestionAnswering(QuestionAnswering, T5Backbone):
    """T5 that finds the first and the last token of an answer."""

    positional_inputs = SEQ2SEQ_INPUTS


class T5EncoderModel(BareModel, T5EncoderBackbone):
    """The encoder of T5 without a head."""


class T5ForTokenClassification(TokenClassification, T5EncoderBackbone):
    """The encoder of T5, classifying each token."""

    dropout_rate = "classifier_dropout"
