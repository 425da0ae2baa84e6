"""ESM-1b and ESM-2 (Rives et al., 2021; Lin et al., 2023, "Evolutionary-scale prediction of
atomic-level protein structure with a language model"), encoders of proteins.

An ESM is a RoBERTa with these differences:

- pre-LayerNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a norm after the blocks
- ESM-2 has rotary positions, whose frequencies are in the files
- masked tokens have the embedding 0, and the others of their sequence are scaled up or down to the
  share of masked tokens in training (`token_dropout`)
- the embeddings of padding are 0
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...mpu import LayerNorm, ParallelMesh, cut_sequence, scatter_sequence
from ..bert.model import BertBackbone, BertBlock, BertEncoder
from ..blocks.embeddings import embed_tokens
from ..blocks.masks import key_mask
from ..blocks.residual import add_and_norm
from ..blocks.rotary import Rotary
from ..heads import BareModel, SequenceClassification, TokenClassification
from ..language_model import MaskedLM
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig, layer_arguments
from .config import EsmConfig

# The share of tokens that were masked while ESM was trained: 15 %, of which 80 % became the mask.
MASKED_IN_TRAINING = 0.15 * 0.8


class EsmBlock(BertBlock):
    """A block that normalizes the inputs of attention and MLP, and rotates queries and keys."""

    def compute(  # type: ignore[override] - it attends to no encoder
        self, x: Tensor, mask: Tensor | None, rotary: Rotary | None
    ) -> Tensor:
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attention(y, mask, rotary=rotary)
        y, x = add_and_norm(self.mlp_norm, self.attention_dropout, y, x)
        return self.mlp_dropout(self.mlp(y), x)


class EsmEncoder(BertEncoder):
    """The embeddings and blocks, and a norm after them.

    Attributes:
        frequencies: [D/2], the angle of each pair of features at position 1. No training changes
            them.
    """

    block_class: Any = EsmBlock
    shared_by_blocks = ("frequencies",)

    def __init__(
        self, config: EsmConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        self.token_dropout = config.token_dropout
        self.mask_token_id = config.mask_token_id
        self.frequencies: nn.Parameter | None = None
        if config.is_rotary:
            del self.position_embeddings
            pairs = config.hidden_size // config.num_attention_heads // 2
            self.frequencies = nn.Parameter(torch.empty(pairs), requires_grad=False)
        self.embedding_dropout = nn.Identity()
        if not config.emb_layer_norm_before:
            self.embedding_norm = nn.Identity()
        shared = layer_arguments(mesh, parallel_config)
        self.final_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, **shared)

    def embed_sequence(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the
        table for a head.
        """
        x, table = embed_tokens(self.word_embeddings, input_ids)
        if self.token_dropout and not input_ids.is_floating_point():
            x = (x * self.cut(self.find_factors(input_ids, attention_mask))).to(x.dtype)
        if self.frequencies is None:
            if position_ids is None:
                position_ids = self.default_position_ids(input_ids)
            x = x + self.position_embeddings(position_ids)
        x = self.embedding_norm(x)
        if attention_mask is not None:
            x = (x * self.cut(attention_mask[..., None])).to(x.dtype)
        return x, table

    def find_factors(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Returns what the embedding of each token is multiplied by, fp32 [B, S, 1]."""
        is_masked = input_ids == self.mask_token_id  # [B, S]
        length: Tensor | int = input_ids.shape[1]
        if attention_mask is not None:
            length = attention_mask.sum(-1)
        share = is_masked.sum(-1).float() / length  # [B]
        factor = (1 - MASKED_IN_TRAINING) / (1 - share)
        return (factor[:, None] * ~is_masked)[..., None]

    def cut(self, x: Tensor) -> Tensor:
        """Returns this rank's positions of [B, S, 1]."""
        x = cut_sequence(x, self.mesh)
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x

    def rotate(self, input_ids: Tensor, position_ids: Tensor | None) -> Rotary | None:
        """Returns the rotation of this rank's positions, or None with learned positions."""
        if self.frequencies is None:
            return None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        own = cut_sequence(position_ids, self.mesh)
        angles = own[:, None, :, None].float() * self.frequencies.float()
        dtype = self.frequencies.dtype
        return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


class EsmBackbone(BertBackbone):
    """The encoder. With `mesh=None` the model is not split."""

    positional_inputs = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
    decoder_inputs = (*positional_inputs, "encoder_hidden_states", "encoder_attention_mask")
    encoder_class: Any = EsmEncoder

    def run_backbone(  # type: ignore[override] - it has no segments
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the blocks: every token attends to all but padding.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], 0 for padding.
            position_ids: int64 [B, S].
            encoder_hidden_states: Must be None; it has its place in the order of transformers.
            encoder_attention_mask: Is not read.

        Raises:
            ValueError: There are `encoder_hidden_states`.
        """
        if encoder_hidden_states is not None:
            raise ValueError(
                f"{type(self).__name__} takes no encoder_hidden_states: it attends to no encoder"
            )
        encoder = cast(EsmEncoder, self.encoder)
        mask = key_mask(attention_mask)
        rotary = encoder.rotate(input_ids, position_ids)
        return self.run_stack(
            encoder.blocks,
            embed=lambda: encoder.embed_sequence(input_ids, attention_mask, position_ids),
            block_arguments=lambda layer: (mask, rotary),
            final_norm=encoder.final_norm,
        )

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if not name.endswith("frequencies"):
            super().initialize_parameter(name, full, generator)
            return
        config = cast(EsmConfig, self.config)
        exponents = torch.arange(len(full), dtype=torch.float32, device=full.device) / len(full)
        full.copy_(1.0 / config.rope_theta**exponents)


class EsmModel(BareModel, EsmBackbone):
    """ESM without a head."""

    positional_inputs = EsmBackbone.decoder_inputs
    pooler_name = "encoder_pooler"


class EsmForMaskedLM(MaskedLM, EsmBackbone):
    """ESM that predicts masked tokens."""

    positional_inputs = EsmBackbone.decoder_inputs


class EsmForSequenceClassification(SequenceClassification, EsmBackbone):
    """ESM that classifies a protein."""

    dense_name = "pooler"
    drops_input = True


class EsmForTokenClassification(TokenClassification, EsmBackbone):
    """ESM that classifies each amino acid."""
