"""Provides what models share outside their blocks: the base classes, language-modeling heads, the loss, the outputs.

A model's forward pass has three parts: the embeddings (a method `embed`), the blocks with the context of the call
(masks, rotary positions, caches), and the end (final norm, head, loss). Only hidden states pass from part to part; the
context follows from the batch. The outputs use Hugging Face's field names. Logits stay vocabulary-parallel.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mpu import (
    LayerNorm,
    ParallelMesh,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_from_tp,
    gather_sequence,
    scatter_sequence,
    tp_size,
    vocab_parallel_cross_entropy,
)
from .blocks.activation_functions import find_activation
from .blocks.linear import ReplicatedLinear
from .blocks.padding import Tokens
from .outputs import CausalLMOutput, LazyLogits, MaskedLMOutput, ModelOutput
from .parallel_config import LayerArguments, ParallelConfig, layer_arguments

Generates = Literal["continuation", "answer", "blanks", "masks"]

VOCABULARY_MULTIPLE = (
    64  # each rank's number of logits is a multiple of it, which makes GPU products much faster
)

IGNORED = -100  # the label of positions without a prediction


class BackboneOutput(NamedTuple):
    """What the embeddings and blocks of a model compute for its head.

    Attributes:
        states: The embedding output and each block's output, the last one after the final norm if there is one,
            [B, S, H], or [B, S/tp, H] under sequence parallelism.
        table: The word embedding table for a tied head; see `VocabParallelHead.forward`.
        encoder_states: The same of the encoder, if `states` are those of a decoder that attends to it.
        encoder_tokens: If given, the encoder's states are the rows of these tokens, [T, 1, H].
    """

    states: list[Tensor]
    table: Tensor | None
    encoder_states: list[Tensor] | None = None
    encoder_tokens: Tokens | None = None


class Backbone(nn.Module):
    """Base of the models: embeddings and blocks, without a head.

    A subclass sets the attributes.
    """

    config: Any  # the family's ModelConfig
    mesh: ParallelMesh | None
    parallel_config: ParallelConfig
    word_embeddings: VocabParallelEmbedding

    def run_backbone(self, *inputs: Any, **options: Any) -> BackboneOutput:
        """Runs the embeddings and blocks. The first two arguments are `input_ids` and `attention_mask`."""
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
        """Returns the whole hidden states [B, S, H], of which each rank may hold a part [B, S/tp, H]."""
        return (
            gather_sequence(x, self.mesh, partial_grad=False)
            if self.parallel_config.sequence_parallel
            else x
        )

    def gather_all_hidden_states(self, hidden_states: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.gather_hidden_states(x) for x in hidden_states)

    def scatter_hidden_states(self, x: Tensor) -> Tensor:
        """Returns this rank's part of whole hidden states [B, S, H]."""
        return scatter_sequence(x, self.mesh) if self.parallel_config.sequence_parallel else x

    def shown_states(self, hidden: BackboneOutput, output_hidden_states: bool) -> dict[str, Any]:
        """Returns the fields of an output that hold hidden states."""

        def gathered(states: Iterable[Tensor]) -> tuple[Tensor, ...] | None:
            return self.gather_all_hidden_states(states) if output_hidden_states else None

        if hidden.encoder_states is None:
            return {"hidden_states": gathered(hidden.states)}

        def padded(x: Tensor) -> Tensor:
            return x if hidden.encoder_tokens is None else hidden.encoder_tokens.pad(x)

        return {
            "decoder_hidden_states": gathered(hidden.states),
            "encoder_last_hidden_state": self.gather_hidden_states(
                padded(hidden.encoder_states[-1])
            ),
            "encoder_hidden_states": gathered(map(padded, hidden.encoder_states)),
        }


class LanguageModel(Backbone):
    """Base of the models that predict the label at each position from the logits at the same position.

    These are masked language models, and decoders whose labels are already shifted. The logits are vocabulary-parallel.
    """

    generates: ClassVar[Generates]
    """What `shardzoo.generation` generates: the continuation of a prompt, an encoder-decoder's answer to a prompt, the
    text of blanks, or the tokens at masked positions."""
    sparse_labels: ClassVar[bool] = False
    """Whether most positions have no label, as in masked language models."""
    extra_input_ids: int = 0
    """The number of ids after the vocabulary that the input embedding accepts, such as those of a soft prompt."""

    def loss_and_logits(
        self,
        head: VocabParallelHead,
        hidden: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None = None,
        table: Tensor | None = None,
    ) -> tuple[Tensor | None, Any]:
        """Returns the loss and the logits [B, S, Vp].

        As in transformers, the loss is the mean over the labels that are not -100, or their sum divided by
        `num_items_in_batch`; it is None without labels. With labels the logits are `LazyLogits`, because the loss
        needs only some of them and keeps none.

        Args:
            hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism.
            labels: int64 [B, S].
            table: See `VocabParallelHead.forward`.
        """

        def logits() -> Tensor:
            return self.unpad_logits(head(hidden, table))

        if labels is None:
            return None, logits()
        loss = head_loss(
            head,
            hidden,
            self.targets(labels),
            table,
            num_items=num_items_in_batch,
            sparse_labels=self.sparse_labels,
        )
        return loss, LazyLogits(logits, head.parameters())

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
        """Returns the logits [B, S, Vp] as a forward pass returns them: without padding, [B, S, V], in one process."""
        return logits[..., : self.config.vocab_size] if tp_size(self.mesh) == 1 else logits

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits of the whole vocabulary: each rank's [B, S, Vp] -> [B, S, V]."""
        return gather_from_tp(logits, self.mesh)[..., : self.config.vocab_size]


def note_target_count(labels: Tensor, count: int) -> None:
    """Notes on `labels` how many of them are not -100, so that a head need not wait for the device to learn it."""
    vars(labels)["target_count"] = count


def head_loss(
    head: VocabParallelHead,
    hidden: Tensor,
    labels: Tensor,
    table: Tensor | None = None,
    *,
    num_items: Tensor | int | None = None,
    sparse_labels: bool = False,
) -> Tensor:
    """Returns the cross-entropy of the head's logits in fp32: the mean, or the sum divided by `num_items`.

    Args:
        hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism.
        labels: int64 [B, S]; -100 is ignored. The mean is NaN if all labels are ignored.
        table: See `VocabParallelHead.forward`.
        sparse_labels: Select the labeled positions on an accelerator too, although the host must wait for it there,
            unless `note_target_count` has told their number.

    Raises:
        ValueError: The shapes do not match, or a label is outside the vocabulary.
    """
    # A compiler can trace neither a gradient that overwrites the logits nor a number of rows that depends on data.
    if torch.compiler.is_compiling():
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
    rows, target = hidden.flatten(0, -2), labels.reshape(-1)
    labeled = target != IGNORED
    count = labeled.sum() if num_items is None else num_items
    if hidden.is_cpu or sparse_labels:
        known: int | None = getattr(labels, "target_count", None)
        chosen = labeled.nonzero() if known is None else torch.nonzero_static(labeled, size=known)
        chosen = chosen[:, 0]
        if len(chosen) < len(target):
            # Without labels, keep one ignored position, so that the gradients are zeros.
            chosen = chosen if len(chosen) else torch.zeros_like(target[:1])
            rows, target = rows[chosen], target[chosen]
    return head.losses(rows, target, table, ignore_index=IGNORED).sum() / count


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
        super().__init__(config, mesh, parallel_config)  # of the backbone
        of_body = {name for name, _ in self.named_children()}
        self.add_head()
        own = {name: module for name, module in self.named_children() if name not in of_body}
        self.head_modules = tuple(
            name for name, module in own.items() if any(True for _ in module.parameters())
        )

    def add_head(self) -> None:
        """Adds the modules of the head."""


def vocabulary_head(model: Backbone) -> VocabParallelHead:
    """Returns a head without a bias, which is the word embedding if the configuration ties them."""
    return VocabParallelHead(
        model.hidden_size,
        model.config.vocab_size,
        tied=model.embedding if model.config.tie_word_embeddings else None,
        pad_multiple=VOCABULARY_MULTIPLE,
        **layer_arguments(model.mesh, model.parallel_config),
    )


class CausalLM(Head, LanguageModel):
    """Predicts each token from the tokens before it. The head is the word embedding if the configuration ties them."""

    generates = "continuation"

    def targets(self, labels: Tensor) -> Tensor:
        # Shifting the labels instead of the hidden states avoids a copy of the hidden states.
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def add_head(self) -> None:
        self.head = vocabulary_head(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *inputs: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by `num_items_in_batch`.

        Args:
            input_ids, attention_mask, inputs, options: See the family's `run_backbone`.
            labels: int64 [B, S], which are shifted here, as in transformers; -100 is ignored.
            logits_to_keep: The number of last positions whose logits are returned; 0 means all.
        """
        hidden = self.run_backbone(input_ids, attention_mask, *inputs, **options)
        x = hidden.states[-1][:, -logits_to_keep:]
        loss, logits = self.loss_and_logits(self.head, x, labels, num_items_in_batch, hidden.table)
        return CausalLMOutput(loss, logits, **self.shown_states(hidden, output_hidden_states))


class MaskedLMHead(nn.Module):
    """Computes norm(activation(dense(x))) times the word embedding, plus a bias.

    Args:
        hidden_size: The width of x; the dense layer's output is as wide as the embedding.
        dense_bias, norm_bias, decoder_bias: Which parts have biases.
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
    ) -> None:
        super().__init__()
        size, words = embedding.weight.shape[1], embedding.num_embeddings
        self.activation = find_activation(activation)
        self.dense = ReplicatedLinear(hidden_size, size, bias=dense_bias, **shared)
        self.norm = LayerNorm(size, eps, bias=norm_bias, **shared)
        self.decoder = VocabParallelHead(size, words, bias=decoder_bias, tied=embedding, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits [B, S, Vp] of [B, S, H] or [B, S/tp, H]."""
        return self.decoder(self.transform(x))

    def transform(self, x: Tensor) -> Tensor:
        """Returns the input of `decoder`, in the shape of x."""
        return self.norm(self.activation(self.dense(x)))


class MaskedLM(Head, LanguageModel):
    """Predicts the masked tokens. The family's bare model has a method `masked_lm_head`."""

    generates = "masks"
    sparse_labels = True
    masked_lm_head: Callable[[], MaskedLMHead]

    def add_head(self) -> None:
        self.head = self.masked_lm_head()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *inputs: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by `num_items_in_batch`.

        Args:
            input_ids, attention_mask, inputs, options: See the family's `run_backbone`.
            labels: int64 [B, S], the token at each position; -100 is ignored.
        """
        hidden = self.run_backbone(input_ids, attention_mask, *inputs, **options)
        x = self.head.transform(hidden.states[-1])
        loss, logits = self.loss_and_logits(
            self.head.decoder, x, labels, num_items_in_batch, hidden.table
        )
        return MaskedLMOutput(loss, logits, **self.shown_states(hidden, output_hidden_states))
