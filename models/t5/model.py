"""T5 (Raffel et al., 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer").

- encoder and decoder share the word embedding; the only positions are a relative bias on the attention scores, from
  one table for each stack, or in UMT5 one for each layer
- pre-RMSNorm blocks: x + attention(norm(x)), in the decoder x + cross_attention(norm(x)), x + mlp(norm(x)); each
  stack ends with a norm
- no biases; attention scores are not scaled; the heads' total width may differ from the hidden size
- v1.0: ReLU; the head is the word embedding, and its input is scaled by d_model^-0.5
- v1.1 and mT5: gated tanh-GELU; the head is a separate matrix, and its input is not scaled
- initial weights as in the paper's code, see `init_weights`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, RMSNorm, VocabParallelEmbedding, VocabParallelHead
from ..common.cache import Cache, LayerKVCache
from ..common.language_model import VOCABULARY_MULTIPLE, EncoderOutput, Seq2SeqLM, Seq2SeqLMOutput
from ..common.masks import causal_mask, key_mask
from ..common.parallel_config import ParallelConfig, layer_arguments, residual_dropout
from ..common.relative_bias import RelativeBias, distance_buckets
from ..common.stack import run_blocks
from ..common.transformer import MLP, CrossAttention, GatedMLP, SelfAttention
from .config import T5Config


class T5Block(nn.Module):
    """One layer of the encoder or of the decoder. The decoder also attends to the encoder's output."""

    def __init__(
        self, config: T5Config, is_decoder: bool, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__()
        size, heads, rate = config.d_model, config.num_heads, config.dropout_rate
        eps, shared = config.layer_norm_epsilon, layer_arguments(mesh, parallel_config)
        block: dict[str, Any] = {"dropout": rate, "mesh": mesh, "parallel_config": parallel_config}
        attention: dict[str, Any] = {
            "head_size": config.d_kv,
            "qkv_bias": False,
            "output_bias": False,
            "scale": 1.0,
            **block,
        }
        self.relative_bias = None
        if not config.shares_relative_bias:
            self.relative_bias = RelativeBias(num_heads=heads, **bucketing(config, is_decoder), mesh=mesh)
        self.attention_norm = RMSNorm(size, eps, **shared)
        self.attention = SelfAttention(size, heads, **attention)
        self.attention_dropout = residual_dropout(rate, mesh, parallel_config)
        self.is_decoder = is_decoder
        if is_decoder:
            self.cross_attention_norm = RMSNorm(size, eps, **shared)
            self.cross_attention = CrossAttention(size, heads, **attention)
            self.cross_attention_dropout = residual_dropout(rate, mesh, parallel_config)
        self.mlp_norm = RMSNorm(size, eps, **shared)
        if config.is_gated:
            self.mlp = GatedMLP(size, config.d_ff, config.activation, **block)
        else:
            self.mlp = MLP(size, config.d_ff, config.activation, bias=False, **block)
        self.mlp_dropout = residual_dropout(rate, mesh, parallel_config)

    def forward(
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
            source: The encoder's output [B, T, H]. For the other arguments see `SelfAttention` and `CrossAttention`.
        """
        bias = position if self.relative_bias is None else self.relative_bias(*position)
        y = self.attention(self.attention_norm(x), mask, bias, causal=self.is_decoder, cache=cache)
        x = clamp_fp16_overflow(x + self.attention_dropout(y))
        if self.is_decoder:
            assert source is not None
            y = self.cross_attention(self.cross_attention_norm(x), source, source_mask, source_cache)
            x = clamp_fp16_overflow(x + self.cross_attention_dropout(y))
        return clamp_fp16_overflow(x + self.mlp_dropout(self.mlp(self.mlp_norm(x))))


class T5Stack(nn.Module):
    """The encoder or the decoder: blocks that share one relative bias, and a final norm."""

    def __init__(
        self,
        config: T5Config,
        layers: int,
        is_decoder: bool,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        self.recompute_blocks = parallel_config.recompute == "full"
        self.bucketing = bucketing(config, is_decoder)
        shares = config.shares_relative_bias
        self.relative_bias = RelativeBias(num_heads=config.num_heads, **self.bucketing, mesh=mesh) if shares else None
        self.embedding_dropout = residual_dropout(config.dropout_rate, mesh, parallel_config)
        self.blocks = nn.ModuleList(T5Block(config, is_decoder, mesh, parallel_config) for _ in range(layers))
        self.final_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, **layer_arguments(mesh, parallel_config))
        self.final_dropout = residual_dropout(config.dropout_rate, mesh, parallel_config)

    def forward(
        self,
        x: Tensor,
        length: int,
        mask: Tensor | None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> list[Tensor]:
        """Returns the embedding output and each block's output, the last one after the final norm.

        Args:
            x: Embeddings [B, S, H], or [B, S/tp, H] under sequence parallelism.
            length: S.
        """
        keys = length if cache is None else cache.length + length  # M + S with M cached positions
        if self.relative_bias is not None:
            position = self.relative_bias(length, keys)  # [1, Np, S, M + S]
        else:
            position = length, keys, distance_buckets(length, keys, x.device, **self.bucketing)
        shared = (mask, position, source, source_mask)
        states = run_blocks(
            self.blocks,
            self.embedding_dropout(x),
            lambda i: (*shared, cache and cache.layers[i], cache and cache.sources[i]),
            self.recompute_blocks,
        )
        states[-1] = self.final_dropout(self.final_norm(states[-1]))
        return states


def bucketing(config: T5Config, is_decoder: bool) -> dict[str, Any]:
    """Returns how distances are put into buckets."""
    return {
        "buckets": config.relative_attention_num_buckets,
        "max_distance": config.relative_attention_max_distance,
        "bidirectional": not is_decoder,
    }


class T5ForConditionalGeneration(Seq2SeqLM):
    """T5 with its language-modeling head. With `mesh=None` the model is not split."""

    config: T5Config

    def __init__(
        self, config: T5Config, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__()
        parallel_config = parallel_config or ParallelConfig()
        self.config, self.mesh, self.parallel_config = config, mesh, parallel_config
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, config.d_model, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )
        self.encoder = T5Stack(config, config.num_layers, False, mesh, parallel_config)
        self.decoder = T5Stack(config, config.decoder_layers, True, mesh, parallel_config)
        tied = self.word_embeddings if config.tie_word_embeddings else None
        self.head = VocabParallelHead(
            config.d_model, config.vocab_size, tied=tied, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: EncoderOutput | tuple[Tensor, ...] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Seq2SeqLMOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by `num_items_in_batch`.

        Args:
            input_ids: int64 [B, S].
            attention_mask: [B, S], 0 for padding.
            decoder_input_ids: int64 [B, T]; by default the labels, shifted right by one.
            decoder_attention_mask: [B, T], or [B, M + T] with a cache; 0 for padding.
            labels: int64 [B, T]; -100 is ignored.
            encoder_outputs: The result of `encode`, instead of input_ids.
            cache: The keys and values of M earlier decoder positions and of the encoder's output; not supported under
                sequence parallelism. With a cache, the decoder may have n rows for each row of the encoder.
            logits_to_keep: The number of last decoder positions whose logits are returned; 0 means all.
        """
        decoder_input_ids = self.decoder_inputs(decoder_input_ids, labels)
        if encoder_outputs is None:
            encoder_states, table = self.run_encoder(input_ids, attention_mask)
        else:
            encoder_states, table = [self.scatter_hidden_states(encoder_outputs[0])], None
        length = decoder_input_ids.shape[1]
        x, table = self.word_embeddings.embed(decoder_input_ids, table)
        decoder_states = self.decoder(
            x,
            length,
            causal_mask(decoder_attention_mask, length, 0 if cache is None else cache.length),
            encoder_states[-1],
            key_mask(attention_mask),
            cache,
        )
        x = decoder_states[-1][:, -logits_to_keep:]  # [B, T, H], or [B, T/tp, H] under sequence parallelism
        if self.config.scale_decoder_outputs:
            x = x * self.config.d_model**-0.5
        loss, logits = self.loss_and_logits(self.head, x, labels, num_items_in_batch, table)
        return Seq2SeqLMOutput(
            loss,
            logits,
            self.gather_all_hidden_states(decoder_states) if output_hidden_states else None,
            self.gather_hidden_states(encoder_states[-1]),
            self.gather_all_hidden_states(encoder_states) if output_hidden_states and encoder_outputs is None else None,
        )

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_hidden_states: bool = False
    ) -> EncoderOutput:
        """Returns the encoder's output, for step-by-step decoding."""
        states, _ = self.run_encoder(input_ids, attention_mask)
        return EncoderOutput(
            self.gather_hidden_states(states[-1]),
            self.gather_all_hidden_states(states) if output_hidden_states else None,
        )

    def run_encoder(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Returns the encoder's hidden states, and the word embedding table for its next use."""
        if input_ids is None:
            raise ValueError("pass input_ids, or the encoder_outputs of an earlier call")
        x, table = self.word_embeddings.embed(input_ids)
        return self.encoder(x, input_ids.shape[1], key_mask(attention_mask)), table

    def init_weights(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place, with the standard deviations of the T5 code base."""
        config, factor = self.config, self.config.initializer_factor
        if "norm" in name:
            full.fill_(factor)
            return
        full.normal_(0.0, factor, generator=generator)
        if name.endswith((".attention.output.weight", ".cross_attention.output.weight")):
            full *= (config.num_heads * config.d_kv) ** -0.5
        elif name.endswith(".down.weight"):
            full *= config.d_ff**-0.5
        elif name != "word_embeddings.weight":
            full *= config.d_model**-0.5
        # The attention scores are not scaled, so the initial query weights are smaller. They are the first block of a
        # fused qkv.
        if name.endswith(("attention.qkv.weight", "cross_attention.query.weight")):
            full[: config.num_heads * config.d_kv] *= config.d_kv**-0.5


def clamp_fp16_overflow(x: Tensor) -> Tensor:
    """Clamps an fp16 residual stream, as in transformers, because T5's overflows in fp16."""
    if x.dtype != torch.float16:
        return x
    most = torch.finfo(x.dtype).max - 1000
    return x.clamp(-most, most)
