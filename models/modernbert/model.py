"""ModernBERT (Warner et al., 2024, "Smarter, Better, Faster, Longer", arXiv:2412.13663).

- rotary positions; every third layer attends to all tokens, with another theta, and the others to a
  window around each
- pre-LayerNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a norm after the embedding,
  in place of the first block's attention norm, and one after the blocks
- GeGLU with one fused projection; no biases, except that of the output head, and no segments
- every head begins with a dense layer, GELU and a norm; the sequence's state is the first token's
  or the mean
- initial weights N(0, 0.02) cut at two standard deviations; those of projections to the residual
  stream are divided by sqrt(2 · layers)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ...mpu import LayerNorm, ParallelMesh, VocabParallelEmbedding
from ..backbone import Backbone
from ..blocks.attention import SelfAttention
from ..blocks.documents import Documents
from ..blocks.embeddings import embed_tokens
from ..blocks.masks import key_mask, restart_positions, window_mask
from ..blocks.mlp import GatedMLP
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.rotary import Rotary, rotary_embedding
from ..blocks.stack import Block, BlockList
from ..language_model import VOCABULARY_MULTIPLE, MaskedLMHead
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig, layer_arguments
from .config import ModernBertConfig


class ModernBertBlock(Block):
    def __init__(
        self,
        config: ModernBertConfig,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.norm_eps
        bias = config.norm_bias
        shared = layer_arguments(mesh, parallel_config)
        self.attention_norm = LayerNorm(size, eps, bias=bias, **shared) if layer else None
        self.attention = SelfAttention(
            size,
            config.num_attention_heads,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            scale=config.head_size**-0.5,
            dropout=config.attention_dropout,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        self.attention_dropout = residual_dropout(config.attention_dropout, mesh, parallel_config)
        self.mlp_norm = LayerNorm(size, eps, bias=bias, **shared)
        self.mlp = GatedMLP(
            size,
            config.intermediate_size,
            config.hidden_activation,
            fused=True,
            bias=config.mlp_bias,
            dropout=config.mlp_dropout,
            mesh=mesh,
            parallel_config=parallel_config,
        )

    def compute(self, x: Tensor, mask: Tensor | Documents | None, rotary: Rotary) -> Tensor:
        y = x
        if self.attention_norm is not None:
            y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, mask, rotary=rotary)
        y, x = add_and_norm(self.mlp_norm, self.attention_dropout, y, x)
        return x + self.mlp(y)


class ModernBertBackbone(Backbone):
    """The embeddings and blocks. With `mesh=None` the model is not split."""

    positional_inputs = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
    config: ModernBertConfig
    block_class: ClassVar[type[ModernBertBlock]] = ModernBertBlock

    def __init__(
        self,
        config: ModernBertConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        parallel_config = parallel_config or ParallelConfig()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config
        size = config.hidden_size
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            size,
            padding_idx=config.padding_idx,
            pad_multiple=VOCABULARY_MULTIPLE,
            **shared,
        )
        self.embedding_norm = LayerNorm(size, config.norm_eps, bias=config.norm_bias, **shared)
        self.embedding_dropout = residual_dropout(config.embedding_dropout, mesh, parallel_config)
        layers = range(config.num_hidden_layers)
        self.blocks = BlockList(
            (self.block_class(config, layer, mesh, parallel_config) for layer in layers),
            parallel_config,
        )
        self.final_norm = LayerNorm(size, config.norm_eps, bias=config.norm_bias, **shared)

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            position_ids: int64 [B, S].
            attention_mask: [B, S], 0 for padding.
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows, which
                attends to itself alone.
        """
        config = self.config
        length = input_ids.shape[1]
        device = input_ids.device
        if position_ids is None and seq_idx is not None:
            position_ids = restart_positions(seq_idx)
        if position_ids is None:
            position_ids = torch.arange(length, device=device)[None]
        near = window_mask(
            attention_mask,
            length,
            0,
            config.local_attention // 2,
            causal=False,
            device=device,
            pieces=seq_idx,
        )
        masks = {"full_attention": key_mask(attention_mask, seq_idx), "sliding_attention": near}
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

        def block_arguments(layer: int) -> tuple[Tensor | Documents | None, Rotary]:
            kind = config.attention_types[layer]
            return masks[kind], rotary[kind]

        return self.run_stack(
            self.blocks,
            embed=lambda: self.embed(input_ids),
            block_arguments=block_arguments,
            final_norm=self.final_norm,
        )

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the
        table for a head.
        """
        x, table = embed_tokens(self.word_embeddings, input_ids)
        return self.embedding_dropout(self.embedding_norm(x)), table

    def masked_lm_head(self) -> MaskedLMHead:
        config = self.config
        return MaskedLMHead(
            self.embedding,
            config.hidden_size,
            config.classifier_activation,
            config.norm_eps,
            layer_arguments(self.mesh, self.parallel_config),
            tied=config.tie_word_embeddings,
            dense_bias=config.classifier_bias,
            norm_bias=config.norm_bias,
            decoder_bias=config.decoder_bias,
        )

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        config = self.config
        if name.endswith(".bias"):
            full.zero_()
        elif "norm" in name:
            full.fill_(1.0)
        else:
            std = config.initializer_range
            if name.endswith(("attention.output.weight", "mlp.down.weight", "head.dense.weight")):
                std /= (2.0 * config.num_hidden_layers) ** 0.5
            elif "classifier" in name or "qa_outputs" in name:
                std = config.hidden_size**-0.5
            limit = config.initializer_cutoff_factor * std
            nn.init.trunc_normal_(full, 0.0, std, -limit, limit, generator=generator)
