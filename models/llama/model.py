"""Llama (Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models") and the
decoders like it.

- rotary positions, with the published scalings for long contexts
- pre-RMSNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a final norm
- causal attention in which several query heads share a key-value head; SwiGLU
- the output head is a separate matrix or the word embedding
- initial weights N(0, 0.02); biases zero

The configuration declares what differs between the families:

- Mistral: attention within a sliding window
- Qwen2: biases of queries, keys and values; windows in some layers
- Qwen3: norms of each head's queries and keys
- Mixtral and Qwen3-MoE: a mixture of experts instead of the MLP (`../mixtral/model.py`)
- OLMoE: norms of the queries, and of the keys, of all heads together
- gpt-oss: sinks of attention; experts with biases and a clamped SwiGLU (`../gpt_oss/model.py`)
- OLMo 2: these norms, and norms of outputs instead of inputs (`../olmo2/model.py`)
- SmolLM3: layers that do not rotate queries and keys
- Phi-3: dropout of the outputs of attention and MLP (`../phi3/model.py`)
- Gemma: norms that add 1 to their weights, scaled embeddings (`../gemma/model.py`)
- Granite: scaled embeddings, residuals, scores and logits (`../granite/model.py`)
- GLM-4: norms of the outputs of attention and MLP too; half of each head rotates, and neighboring
  features are a pair
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, RMSNorm, VocabParallelEmbedding
from ..backbone import Backbone
from ..blocks.attention import SelfAttention
from ..blocks.cache import Cache, LayerKVCache
from ..blocks.documents import Documents
from ..blocks.embeddings import embed_tokens
from ..blocks.masks import causal_mask, find_pieces, restart_positions, window_mask
from ..blocks.mlp import GatedMLP
from ..blocks.rotary import Rotary, rotary_embedding
from ..blocks.stack import Block, BlockList
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, QuestionAnswering, SequenceClassification, TokenClassification
from ..language_model import VOCABULARY_MULTIPLE, CausalLM
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig, layer_arguments
from .config import DecoderConfig

Masks = Mapping[int | None, Tensor | Documents | None]  # window of a layer -> its mask


class LlamaBlock(Block):
    """A block of Llama or of a sibling."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        shared = layer_arguments(mesh, parallel_config)
        norm = partial(RMSNorm, size, eps, offset=config.norm_offset, **shared)
        self.window = config.windows[layer]
        self.rotates = config.rotates[layer]
        self.attention_norm = norm() if config.input_norms else nn.Identity()
        self.attention = self.build_attention(config, mesh, parallel_config)
        self.attention_output_norm = norm() if config.sandwich_norms else nn.Identity()
        self.mlp_norm = norm() if config.input_norms else nn.Identity()
        self.mlp = self.build_mlp(config, layer, mesh, parallel_config)
        self.mlp_output_norm = norm() if config.sandwich_norms else nn.Identity()

    def build_attention(
        self, config: DecoderConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> nn.Module:
        """Returns the attention of a layer, which maps [B, S, H] to [B, S, H]."""
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            num_key_value_heads=config.key_value_heads,
            head_size=config.head_size,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            norm_offset=config.norm_offset,
            norms_all_heads=config.norms_all_heads,
            clip=config.clip,
            scale=config.attention_scale,
            softcap=config.score_cap,
            dropout=config.attention_dropout,
            sinks=config.attention_sinks,
            mesh=mesh,
            parallel_config=parallel_config,
        )

    def build_mlp(
        self,
        config: DecoderConfig,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> nn.Module:
        """Returns the feed-forward part of a layer, which maps [B, S, H] to [B, S, H]."""
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            fused=True,
            bias=config.mlp_bias,
            mesh=mesh,
            parallel_config=parallel_config,
        )

    def compute(
        self, x: Tensor, masks: Masks, rotary: Rotary, cache: LayerKVCache | None = None
    ) -> Tensor:
        y, x = self.attention_norm(x, return_residual=True)
        rotation = rotary if self.rotates else None
        y = self.attention(y, masks[self.window], causal=True, rotary=rotation, cache=cache)
        y, x = self.mlp_norm(self.attention_output_norm(y), x, return_residual=True)
        return x + self.mlp_output_norm(self.mlp(y))


class LlamaBackbone(Backbone):
    """Llama, or a sibling, without a head. With `mesh=None` the model is not split."""

    positional_inputs = (
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "inputs_embeds",
    )
    config: DecoderConfig
    block_class: ClassVar[type[LlamaBlock]] = LlamaBlock
    embedding_class: ClassVar[type[VocabParallelEmbedding]] = VocabParallelEmbedding

    def __init__(
        self,
        config: DecoderConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        parallel_config = parallel_config or ParallelConfig()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = self.embedding_class(
            config.vocab_size,
            config.hidden_size,
            pad_multiple=VOCABULARY_MULTIPLE,
            padding_idx=config.padding_idx,
            **shared,
        )
        layers = range(config.num_hidden_layers)
        self.blocks = BlockList(
            (self.block_class(config, layer, mesh, parallel_config) for layer in layers),
            parallel_config,
        )
        self.final_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, offset=config.norm_offset, **shared
        )

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], or [B, M + S] with a cache; 0 for padding.
            position_ids: int64 [B, S] or [1, S]. Without a mask and a cache, rows whose positions
                restart are packed, and each of their pieces attends to itself alone.
            cache: The keys and values of M earlier positions; not supported under sequence
                parallelism.
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows.
        """
        config = self.config
        length = input_ids.shape[1]
        cached = 0 if cache is None else cache.length
        pieces = find_pieces(seq_idx, position_ids, attention_mask, cache is not None)
        if position_ids is None and pieces is not None:
            position_ids = restart_positions(pieces)
        if position_ids is None:
            position_ids = torch.arange(cached, cached + length, device=input_ids.device)[None]
        rotaries: list[Rotary] = []
        for layer, rope in enumerate(config.ropes):
            # Most families rotate all layers alike, and the others have layers of two kinds.
            first = config.ropes.index(rope)
            if first < layer:
                rotaries.append(rotaries[first])
                continue
            rotary = rotary_embedding(
                position_ids,
                config.head_size,
                rope,
                config.max_position_embeddings,
                self.dtype,
                interleaved=config.interleaved,
                mesh=self.mesh,
            )
            rotaries.append(rotary)
        masks: dict[int | None, Tensor | Documents | None] = {}
        for window in set(config.windows):
            if window is None:
                masks[window] = causal_mask(attention_mask, length, pieces)
            else:
                masks[window] = window_mask(
                    attention_mask,
                    length,
                    cached,
                    window,
                    causal=True,
                    device=input_ids.device,
                    pieces=pieces,
                )
        return self.run_stack(
            self.blocks,
            embed=lambda: self.embed(input_ids),
            block_arguments=lambda layer: (masks, rotaries[layer], cache and cache.layers[layer]),
            final_norm=self.final_norm,
        )

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the
        table for a head.
        """
        return embed_tokens(self.word_embeddings, input_ids)

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(".bias"):
            full.zero_()
        elif "norm" in name:
            full.fill_(1.0 - (self.config.norm_offset or 0.0))
        else:
            full.normal_(0.0, self.config.initializer_range, generator=generator)


class LlamaForCausalLM(CausalLM, LlamaBackbone, GenerationMixin):
    """Llama that predicts the next token."""


class LlamaModel(BareModel, LlamaBackbone):
    """Llama without a head."""


class LlamaForSequenceClassification(SequenceClassification, LlamaBackbone):
    """Llama that classifies a text."""

    pooling = "last"
    dropout_rate = None
    bias = False
    linear_name = "classifier"


class LlamaForTokenClassification(TokenClassification, LlamaBackbone):
    """Llama that classifies each token."""

    linear_name = "classifier"


class LlamaForQuestionAnswering(QuestionAnswering, LlamaBackbone):
    """Llama that finds the first and the last token of an answer."""
