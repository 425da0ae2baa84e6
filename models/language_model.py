"""Provides the models of language: their loss, and the heads that predict tokens.

Logits stay vocabulary-parallel.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mpu import (
    LayerNorm,
    VocabParallelEmbedding,
    VocabParallelHead,
    context_size,
    cut_sequence,
    gather_from_context,
    gather_from_tp,
    gather_sequence,
    reduce_from_context,
    tp_size,
    vocab_parallel_cross_entropy,
)
from ..ops.device import can_overwrite_gradients, host_can_read
from .backbone import Backbone, Head
from .blocks.activation_functions import find_activation
from .blocks.linear import ReplicatedLinear
from .calls import keep_positions
from .generation.mixin import GenerationMixin
from .outputs import CausalLMOutput, LazyLogits, MaskedLMOutput, ModelOutput, StageOutput
from .parallel_config import LayerArguments, layer_arguments

# Each rank's number of logits is a multiple of it, which makes GPU products much faster.
VOCABULARY_MULTIPLE = 64

IGNORED = -100  # the label of positions without a prediction


class LanguageModel(GenerationMixin, Backbone):
    """Base of the models that predict the label at each position from the logits at the same
    position.

    These are masked language models, and decoders whose labels are already shifted. The logits are
    vocabulary-parallel.
    """

    sparse_labels: ClassVar[bool] = False
    """Whether most positions have no label, as in masked language models."""
    extra_input_ids: int = 0
    """The number of ids after the vocabulary that the input embedding accepts, such as those of a
    soft prompt.
    """

    def loss_and_logits(
        self,
        head: VocabParallelHead,
        hidden: Tensor,
        targets: Tensor | None,
        num_items_in_batch: Tensor | int | None = None,
        table: Tensor | None = None,
    ) -> tuple[Tensor | None, Any]:
        """Returns the loss and the logits [B, S, Vp].

        As in transformers, the loss is the mean over the labels that are not -100, or their sum
        divided by `num_items_in_batch`; it is None without labels. With labels the logits are
        `LazyLogits`, because the loss needs only some of them and keeps none.

        Args:
            hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism; of this rank's positions under
                context parallelism, as the logits.
            targets: int64 [B, S], the id that each position predicts; see `targets`.
            table: See `VocabParallelHead.forward`.
        """

        def logits() -> Tensor:
            return self.unpad_logits(head(hidden, table))

        if targets is None:
            return None, logits()
        if num_items_in_batch is None and context_size(self.mesh) > 1:
            num_items_in_batch = (targets != IGNORED).sum()
        loss = compute_loss(
            head,
            hidden,
            cut_sequence(targets, self.mesh),
            table,
            num_items=num_items_in_batch,
            sparse_labels=self.sparse_labels,
        )
        return reduce_from_context(loss, self.mesh), LazyLogits(logits, head.parameters())

    def targets(self, labels: Tensor) -> Tensor:
        """Returns the id that each position predicts, int64 [B, S]."""
        return labels

    @property
    def label_classes(self) -> int:
        """The number of classes of the labels, which are token ids."""
        return self.config.vocab_size

    def count_targets(self, labels: Tensor) -> Tensor:
        """Returns the number of predictions that enter the loss of `labels`."""
        return (self.targets(labels) != IGNORED).sum()

    def unpad_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, S, Vp] as a forward pass returns them: without padding, [B, S, V],
        in one process, and with `returns_whole_logits`.
        """
        if tp_size(self.mesh) > 1:
            if not self.returns_whole_logits:
                return logits
            logits = gather_from_tp(logits, self.mesh)
        return logits[..., : self.config.vocab_size]

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits of the whole vocabulary: each rank's [B, S, Vp] -> [B, S, V]; of the
        whole sequence, if context-parallel ranks have parts of it.
        """
        whole = logits
        if not self.returns_whole_logits:
            whole = gather_from_tp(logits, self.mesh)[..., : self.config.vocab_size]
        return gather_from_context(whole, self.mesh, -2)


def note_target_count(labels: Tensor, count: int) -> None:
    """Notes on `labels` how many of them are not -100.

    A head that knows it need not wait for the device.
    """
    vars(labels)["target_count"] = count


class TokenCount(NamedTuple):
    """What the host knows of a mask that is on a device.

    Attributes:
        tokens: How many elements of the mask are not 0.
        pads_right: Whether no token of a sample comes after padding.
    """

    tokens: int
    pads_right: bool


def count_mask(attention_mask: Tensor) -> TokenCount:
    """Returns the counts of a mask [B, S] in the host's memory, or of one that the host waits for."""
    is_token = attention_mask != 0
    follows_padding = is_token[..., 1:] & ~is_token[..., :-1]
    return TokenCount(int(is_token.count_nonzero()), not bool(follows_padding.any()))


def note_token_count(attention_mask: Tensor, count: TokenCount) -> None:
    """Notes on a mask [B, S] what the host knows of it.

    An encoder that knows it leaves padding out of its layers without waiting for the device.
    """
    vars(attention_mask)["token_count"] = count


def compute_loss(
    head: VocabParallelHead,
    hidden: Tensor,
    labels: Tensor,
    table: Tensor | None = None,
    *,
    num_items: Tensor | int | None = None,
    sparse_labels: bool = False,
) -> Tensor:
    """Returns the cross-entropy of the head's logits in fp32: the mean, or the sum divided by
    `num_items`.

    Args:
        hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism.
        labels: int64 [B, S]; -100 is ignored. The mean is NaN if all labels are ignored.
        table: See `VocabParallelHead.forward`.
        sparse_labels: Select the labeled positions on an accelerator too, if `note_target_count`
            has told their number. The host would have to wait for the device to learn it.

    Raises:
        ValueError: The shapes do not match, or a label is outside the vocabulary.
    """
    # A compiler can trace neither a gradient that overwrites the logits nor a number of rows that
    # depends on data.
    if not can_overwrite_gradients():
        logits = head(hidden, table)
        reduction = "mean" if num_items is None else "sum"
        loss = vocab_parallel_cross_entropy(
            logits, labels, num_classes=head.num_embeddings, mesh=head.mesh, reduction=reduction
        )
        return loss if num_items is None else loss / num_items
    if head.sequence_parallel:
        hidden = gather_sequence(hidden, head.mesh)
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} do not match the positions {tuple(hidden.shape[:-1])}"
        )
    rows = hidden.flatten(0, -2)
    target = labels.reshape(-1)
    labeled = target != IGNORED
    count = labeled.sum() if num_items is None else num_items
    known: int | None = getattr(labels, "target_count", None)
    if host_can_read(hidden) or (sparse_labels and known is not None):
        if known is None:
            chosen = labeled.nonzero()[:, 0]
        else:
            chosen = torch.nonzero_static(labeled, size=known)[:, 0]
        if len(chosen) < len(target):
            if not len(chosen):
                # Keep one ignored position, so that the gradients are zeros.
                chosen = torch.zeros_like(target[:1])
            rows = rows[chosen]
            target = target[chosen]
    return head.losses(rows, target, table, ignore_index=IGNORED).sum() / count


def vocabulary_head(
    model: Backbone, *, fixed_bias: bool = False, softcap: float | None = None
) -> VocabParallelHead:
    """Returns a head without a trained bias, which is the word embedding if the configuration ties
    them.
    """
    return VocabParallelHead(
        model.hidden_size,
        model.config.vocab_size,
        fixed_bias=fixed_bias,
        softcap=softcap,
        tied=model.embedding if model.config.tie_word_embeddings else None,
        pad_multiple=VOCABULARY_MULTIPLE,
        **layer_arguments(model.mesh, model.parallel_config),
    )


class CausalLM(Head, LanguageModel):
    """Predicts each token from the tokens before it.

    The head is the word embedding if the configuration ties them.
    """

    generates = "continuation"
    label_names = ("labels",)

    def targets(self, labels: Tensor) -> Tensor:
        # Shifting the labels instead of the hidden states avoids a copy of the hidden states.
        return F.pad(labels[..., 1:], (0, 1), value=IGNORED)

    def add_head(self) -> None:
        self.head = vocabulary_head(self)

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: Tensor | int = 0,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> ModelOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by
        `num_items_in_batch`.

        Args:
            input_ids, attention_mask, options: See the family's `run_backbone`.
            labels: int64 [B, S], which are shifted here, as in transformers; -100 is ignored. In
                packed rows, the first label of each piece must be -100.
            logits_to_keep: The positions whose logits are returned; see `keep_positions`.
            shift_labels: int64 [B, S], labels that the caller has shifted, instead of labels.
        """
        hidden = self.run_backbone(input_ids, attention_mask, **options)
        if isinstance(hidden, StageOutput):
            return hidden
        x = self.head_input(keep_positions(hidden.states[-1], logits_to_keep))
        targets = shift_labels
        if shift_labels is None and labels is not None:
            targets = self.targets(labels)
        loss, logits = self.loss_and_logits(
            self.output_head, x, targets, num_items_in_batch, hidden.table
        )
        states = self.collect_hidden_states(hidden, output_hidden_states)
        return CausalLMOutput(loss, logits, **states)

    @property
    def output_head(self) -> VocabParallelHead:
        """What makes the logits."""
        return self.head

    def head_input(self, x: Tensor) -> Tensor:
        """Returns what the output head multiplies, from the last hidden states."""
        return x


class MaskedLMHead(nn.Module):
    """Computes norm(activation(dense(x))) times the word embedding, plus a bias.

    Args:
        hidden_size: The width of x; the dense layer's output is as wide as the embedding.
        dense_bias, norm_bias, decoder_bias: Which parts have biases.
        tied: Whether it multiplies the word embedding itself, or a matrix of the same shape.
    """

    def __init__(
        self,
        embedding: VocabParallelEmbedding,
        hidden_size: int,
        activation: str,
        eps: float,
        shared: LayerArguments,
        *,
        dense_bias: bool = True,
        norm_bias: bool = True,
        decoder_bias: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        size = embedding.weight.shape[1]
        words = embedding.num_embeddings
        self.activation = find_activation(activation)
        self.dense = ReplicatedLinear(hidden_size, size, bias=dense_bias, **shared)
        self.norm = LayerNorm(size, eps, bias=norm_bias, **shared)
        self.decoder = VocabParallelHead(
            size,
            words,
            bias=decoder_bias,
            tied=embedding if tied else None,
            pad_multiple=embedding.shard.pad_multiple,
            **shared,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits [B, S, Vp] of [B, S, H] or [B, S/tp, H]."""
        return self.decoder(self.transform(x))

    def transform(self, x: Tensor) -> Tensor:
        """Returns the input of `decoder`, in the shape of x."""
        return self.norm(self.activation(self.dense(x)))


class MaskedHeadCausalLM(CausalLM):
    """Predicts each token from the tokens before it, with the head of a masked language model."""

    masked_lm_head: Callable[[], MaskedLMHead]

    def add_head(self) -> None:
        self.head = self.masked_lm_head()

    @property
    def output_head(self) -> VocabParallelHead:
        return self.head.decoder

    def head_input(self, x: Tensor) -> Tensor:
        return self.head.transform(x)


class MaskedLM(Head, LanguageModel):
    """Predicts the masked tokens. The family's bare model has a method `masked_lm_head`."""

    generates = "masks"
    label_names = ("labels",)
    sparse_labels = True
    masked_lm_head: Callable[[], MaskedLMHead]

    def add_head(self) -> None:
        self.head = self.masked_lm_head()

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> ModelOutput | StageOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by
        `num_items_in_batch`.

        Args:
            input_ids, attention_mask, options: See the family's `run_backbone`.
            labels: int64 [B, S], the token at each position; -100 is ignored.
        """
        hidden = self.run_backbone(input_ids, attention_mask, **options)
        if isinstance(hidden, StageOutput):
            return hidden
        x = self.head.transform(hidden.states[-1])
        loss, logits = self.loss_and_logits(
            self.head.decoder, x, labels, num_items_in_batch, hidden.table
        )
        states = self.collect_hidden_states(hidden, output_hidden_states)
        return MaskedLMOutput(loss, logits, **states)
