"""What models that predict tokens share around their blocks: the loss, logits, learned positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ...mpu import (
    ParallelMesh,
    VocabParallelHead,
    gather_from_tp,
    gather_sequence,
    scatter_sequence,
    tp_size,
)
from .config import ModelConfig
from .head_loss import IGNORED, head_loss
from .outputs import LazyLogits
from .parallel_config import ParallelConfig

Generates = Literal["continuation", "answer", "blanks", "masks"]

VOCABULARY_MULTIPLE = 64  # a rank's logits are this aligned, which GPUs multiply much faster


class PositionEmbedding(nn.Embedding):
    """A learned, replicated table of positions or segments; under sequence parallelism a rank gets its slice of
    the output. The row of `padding_idx` gets no gradient."""

    def __init__(
        self,
        positions: int,
        hidden_size: int,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(positions, hidden_size, padding_idx=padding_idx)
        self.sequence_parallel, self.mesh = sequence_parallel, mesh

    def reset_parameters(self) -> None:
        """`initialize` draws the values; drawing shapes alone would load all of torch's compiler."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, H], or [B, S/tp, H]"""
        x = super().forward(position_ids)
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x


class LanguageModel(nn.Module):
    """Base of the models whose logits at a position are for the label at that position (masked language models,
    decoders whose labels are aligned); their logits are vocabulary-parallel."""

    config: ModelConfig
    mesh: ParallelMesh | None
    parallel_config: ParallelConfig
    generates: ClassVar[Generates]
    """What `shardzoo.generation` makes with it: the continuation of a prompt, an encoder-decoder's answer to one, the
    contents of the blanks in a text, or the tokens at masked places."""
    sparse_labels: ClassVar[bool] = False
    """Whether most positions have no label, as in masked language models."""
    extra_input_ids: int = 0
    """How many ids behind the vocabulary the input embedding knows, such as a soft prompt's."""

    def loss_and_logits(
        self,
        head: VocabParallelHead,
        hidden: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None = None,
        table: Tensor | None = None,
    ) -> tuple[Tensor | None, Any]:
        """(loss, logits [B, S, Vp]) of hidden states [B, S, H], or [B, S/tp, H] under sequence parallelism.

        The loss is the mean over the labels int64 [B, S] that are not -100, or their sum divided by
        `num_items_in_batch`, as in transformers; None without labels. With labels the logits are `LazyLogits`: the
        loss needs fewer of them, and none afterwards. table: see `VocabParallelHead.forward`.
        """

        def logits() -> Tensor:
            return self.unpad_logits(head(hidden, table))

        if labels is None:
            return None, logits()
        loss = head_loss(
            head, hidden, self.targets(labels), table, num_items=num_items_in_batch, sparse_labels=self.sparse_labels
        )
        return loss, LazyLogits(logits, head.parameters())

    def targets(self, labels: Tensor) -> Tensor:
        """What each position has to predict, int64 [B, S]."""
        return labels

    def count_targets(self, labels: Tensor) -> Tensor:
        """How many predictions the loss of `labels` is made of."""
        return (self.targets(labels) != IGNORED).sum()

    def unpad_logits(self, logits: Tensor) -> Tensor:
        """What a forward pass returns of its logits [B, S, Vp]: in one process [B, S, V], as transformers does."""
        return logits[..., : self.config.vocab_size] if tp_size(self.mesh) == 1 else logits

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Each rank's [B, S, Vp] -> [B, S, V]"""
        return gather_from_tp(logits, self.mesh)[..., : self.config.vocab_size]

    def gather_hidden_states(self, x: Tensor) -> Tensor:
        """What a caller gets to see of [B, S, H] hidden states, of which a rank may hold [B, S/tp, H]."""
        return gather_sequence(x, self.mesh, partial_grad=False) if self.parallel_config.sequence_parallel else x

    def gather_all_hidden_states(self, hidden_states: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.gather_hidden_states(x) for x in hidden_states)

    def scatter_hidden_states(self, x: Tensor) -> Tensor:
        """The part of a caller's [B, S, H] that this rank's blocks work on."""
        return scatter_sequence(x, self.mesh) if self.parallel_config.sequence_parallel else x
