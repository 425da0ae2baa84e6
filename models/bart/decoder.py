"""BART's decoder without its encoder, as a causal language model."""

from __future__ import annotations

from torch import Tensor

from ...mpu import ParallelMesh
from ..blocks.cache import Cache
from ..blocks.embeddings import embed_tokens
from ..blocks.masks import causal_mask, find_pieces
from ..blocks.stack import BlockList
from ..generation.mixin import GenerationMixin
from ..language_model import CausalLM
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig
from .config import BartConfig
from .model import BartEmbeddings, BartStack


class BartDecoderBackbone(BartEmbeddings):
    """The decoder without a head.

    Its attention to an encoder is unused and frozen; it is there for the files.
    """

    def __init__(
        self,
        config: BartConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.decoder = BartStack(config, True, mesh, self.parallel_config)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = ".cross_attention" not in name

    positional_inputs = (
        "input_ids",
        "attention_mask",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "past_key_values",
        "inputs_embeds",
    )

    @property
    def blocks(self) -> BlockList:
        return self.decoder.blocks

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the decoder.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], or [B, M + S] with a cache; 0 for padding.
            position_ids: Not used: padding has positions like other tokens, as in transformers.
            cache: The keys and values of M earlier positions; not supported under sequence
                parallelism.
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows, which
                attends to itself alone.
        """
        pieces = find_pieces(seq_idx, None, attention_mask, cache is not None)
        if self.blocks.has_first:
            x, table = embed_tokens(self.word_embeddings, input_ids)
        else:
            x = self.receive_hidden_states()
            table = None
        mask = causal_mask(attention_mask, input_ids.shape[1], pieces)
        states = self.decoder(x, input_ids, mask, cache=cache, pieces=pieces)
        if not self.blocks.has_last:
            return self.send_hidden_states(states[-1])
        return BackboneOutput(states, table)


class AlignedCausalLM(CausalLM):
    """Predicts each token from the tokens before it.

    As in transformers, the caller shifts the labels.
    """

    def targets(self, labels: Tensor) -> Tensor:
        return labels


class BartForCausalLM(AlignedCausalLM, BartDecoderBackbone, GenerationMixin):
    """The decoder of BART, predicting the next token."""
