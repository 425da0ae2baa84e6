"""Provides the base class of all models: embeddings and blocks, on which a head is put."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..mpu import ParallelMesh, VocabParallelEmbedding, gather_sequence, scatter_sequence
from .outputs import BackboneOutput, StageOutput
from .parallel_config import ParallelConfig
from .pipeline import PipelineStage


class Backbone(PipelineStage):
    """Base of the models: embeddings and blocks, without a head.

    A family's backbone sets the attributes and gives `run_backbone` and `init_weights`.
    `run_backbone` has three parts: the embeddings, the blocks with what follows from the batch
    (masks, rotary positions, caches), and the final norm. Most families give all three to
    `run_stack`; encoder-decoders have `Seq2SeqBackbone.run_backbone`.
    """

    config: Any  # the family's ModelConfig
    mesh: ParallelMesh | None
    parallel_config: ParallelConfig
    word_embeddings: VocabParallelEmbedding

    def run_backbone(self, *inputs: Any, **options: Any) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks.

        The first two arguments are `input_ids` and `attention_mask`.
        """
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """The width H of the hidden states."""
        return getattr(self.config, self.config.attribute_map.get("hidden_size", "hidden_size"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, on every stage of a pipeline."""
        return next(self.parameters()).dtype

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The word embedding, to which a head may be tied."""
        return self.word_embeddings

    @classmethod
    def example_ids(cls, config: Any, ids: Tensor) -> Tensor:
        """Returns arbitrary token ids int64 [B, S] in the form that the head takes, to try it."""
        return ids

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits of all classes, for logits that are replicated: the same."""
        return logits

    def gather_hidden_states(self, x: Tensor) -> Tensor:
        """Returns the whole hidden states [B, S, H], of which each rank may hold a part [B, S/tp,
        H].
        """
        if not self.parallel_config.sequence_parallel:
            return x
        return gather_sequence(x, self.mesh, partial_grad=False)

    def gather_all_hidden_states(self, hidden_states: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Returns the whole hidden states of several blocks; see `gather_hidden_states`."""
        return tuple(self.gather_hidden_states(x) for x in hidden_states)

    def scatter_hidden_states(self, x: Tensor) -> Tensor:
        """Returns this rank's part of whole hidden states [B, S, H]."""
        return scatter_sequence(x, self.mesh) if self.parallel_config.sequence_parallel else x

    def collect_hidden_states(
        self, hidden: BackboneOutput, output_hidden_states: bool
    ) -> dict[str, Any]:
        """Returns the fields of an output that hold hidden states.

        Args:
            output_hidden_states: Whether the caller wants those of all blocks; otherwise these
                fields are None.
        """
        states = None
        if output_hidden_states:
            states = self.gather_all_hidden_states(hidden.states)
        if hidden.encoder_states is None:
            return {"hidden_states": states}

        encoder_states = hidden.encoder_states
        if hidden.encoder_tokens is not None:
            wanted = encoder_states if output_hidden_states else encoder_states[-1:]
            encoder_states = [hidden.encoder_tokens.pad(x) for x in wanted]
        last = self.gather_hidden_states(encoder_states[-1])
        every = None
        if output_hidden_states:
            every = self.gather_all_hidden_states(encoder_states)
        return {
            "decoder_hidden_states": states,
            "encoder_last_hidden_state": last,
            "encoder_hidden_states": every,
        }


class Head(Backbone):
    """Base of the heads. An architecture inherits from a head and from its family's backbone.

    Attributes:
        head_modules: The names of the modules of the head that have parameters.
    """

    def __init__(
        self,
        config: Any,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__(config, mesh, parallel_config)  # of the family's backbone
        backbone_modules = {name for name, _ in self.named_children()}
        self.add_head()
        names: list[str] = []
        for name, module in self.named_children():
            if name not in backbone_modules and any(True for _ in module.parameters()):
                names.append(name)
        self.head_modules = tuple(names)

    def add_head(self) -> None:
        """Adds the modules of the head."""
