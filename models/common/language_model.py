"""Provides what models share outside their blocks: the base classes, language-modeling heads, the loss, the outputs.

A model's forward pass has three parts: the embeddings (a method `embed`), the blocks with the context of the call
(masks, rotary positions, caches), and the end (final norm, head, loss). Only hidden states pass from part to part; the
context follows from the batch. The outputs use Hugging Face's field names. Logits stay vocabulary-parallel.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import (
    LayerNorm,
    ParallelMesh,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    scatter_sequence,
    tp_size,
    vocab_parallel_cross_entropy,
)
from .padding import Tokens
from .parallel_config import LayerArguments, ParallelConfig, layer_arguments
from .transformer import find_activation

Generates = Literal["continuation", "answer", "blanks", "masks"]

VOCABULARY_MULTIPLE = (
    64  # each rank's number of logits is a multiple of it, which makes GPU products much faster
)
IGNORED = -100  # the label of positions without a prediction


class Hidden(NamedTuple):
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


class Body(nn.Module):
    """Base of the models: embeddings and blocks, without a head.

    A subclass sets the attributes.
    """

    config: Any  # the family's ModelConfig
    mesh: ParallelMesh | None
    parallel_config: ParallelConfig
    word_embeddings: VocabParallelEmbedding

    def body(self, *inputs: Any, **options: Any) -> Hidden:
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

    def shown_states(self, hidden: Hidden, output_hidden_states: bool) -> dict[str, Any]:
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


class LanguageModel(Body):
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


class Head(Body):
    """Base of the kinds of heads. Classes that `with_heads` makes inherit from a kind and from a bare model.

    Attributes:
        head_modules: The names of the modules of the head that have parameters.
    """

    def __init__(
        self,
        config: Any,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__(config, mesh, parallel_config)  # of the bare model
        of_body = {name for name, _ in self.named_children()}
        self.add_head()
        own = {name: module for name, module in self.named_children() if name not in of_body}
        self.head_modules = tuple(
            name for name, module in own.items() if any(True for _ in module.parameters())
        )

    def add_head(self) -> None:
        """Adds the modules of the head."""


def vocabulary_head(model: Body) -> VocabParallelHead:
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
            input_ids, attention_mask, inputs, options: See the family's `body`.
            labels: int64 [B, S], which are shifted here, as in transformers; -100 is ignored.
            logits_to_keep: The number of last positions whose logits are returned; 0 means all.
        """
        hidden = self.body(input_ids, attention_mask, *inputs, **options)
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
            input_ids, attention_mask, inputs, options: See the family's `body`.
            labels: int64 [B, S], the token at each position; -100 is ignored.
        """
        hidden = self.body(input_ids, attention_mask, *inputs, **options)
        x = self.head.transform(hidden.states[-1])
        loss, logits = self.loss_and_logits(
            self.head.decoder, x, labels, num_items_in_batch, hidden.table
        )
        return MaskedLMOutput(loss, logits, **self.shown_states(hidden, output_hidden_states))


class PositionEmbedding(nn.Embedding):
    """A learned, replicated table of positions or segments. The row of `padding_idx` gets no gradient.

    Under sequence parallelism, each rank gets its slice of the output.
    """

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
        """Does nothing: `initialize` sets the values, and sampling on the meta device would load PyTorch's compiler."""

    def forward(self, input: Tensor | range) -> Tensor:
        """Maps position ids [B, S] to [B, S, H], or [B, S/tp, H] under sequence parallelism; a range to [1, S, H]."""
        x = (
            self.weight[input.start : input.stop][None]
            if isinstance(input, range)
            else super().forward(input)
        )
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x


class ReplicatedLinear(nn.Linear):
    """y = x Wᵀ + b with the same weight on every rank. Input [..., in], output [..., out].

    Args:
        bias: Whether there is a b.
        sequence_parallel: The input is this rank's part of the sequence, so the parameters' gradients are summed over
            the tensor-parallel ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.sequence_parallel, self.mesh = sequence_parallel, mesh

    def forward(self, input: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return F.linear(input, self.weight, self.bias)
        own = list(
            self.parameters(recurse=False)
        )  # the weight and perhaps a bias, whose gradients one all-reduce sums
        joined = copy_to_tp(torch.cat([parameter.flatten() for parameter in own]), self.mesh)
        weight, *bias = torch.split(joined, [parameter.numel() for parameter in own])
        return F.linear(input, weight.view_as(self.weight), *bias)


@dataclass
class ModelOutput:
    """Base of the outputs: dataclasses whose fields, except those that are None, also have an index and a key.

    A field without a default may be `LazyLogits`. Reading it computes it, so all tensor-parallel ranks must read it.
    """

    def __post_init__(self) -> None:
        self._lazy_logits = {
            name: value for name, value in vars(self).items() if isinstance(value, LazyLogits)
        }
        for name in self._lazy_logits:
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        deferred = vars(self).get("_lazy_logits", {})
        if name not in deferred:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = deferred[name].read(name)
        del deferred[name]
        setattr(self, name, value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        for name in tuple(self._lazy_logits):
            getattr(self, name)
        return vars(self)

    def keys(self) -> tuple[str, ...]:
        names = (field.name for field in fields(self))
        return tuple(
            name for name in names if name in self._lazy_logits or getattr(self, name) is not None
        )

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.keys())

    def __getitem__(self, key: int | slice | str) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self.keys():
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self):
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.keys())


class LazyLogits:
    """Logits that are computed only when they are read.

    The computation uses the gradient mode and the autocast setting of the forward pass. `parameters` must not change
    between the forward pass and the reading.
    """

    def __init__(self, calculate: Callable[[], Tensor], parameters: Iterable[Tensor]) -> None:
        self.calculate, self.parameters = calculate, tuple(parameters)
        self.versions = versions(self.parameters)
        self.grad = torch.is_grad_enabled()
        self.device = self.parameters[0].device.type
        self.autocast = (
            torch.is_autocast_enabled(self.device),
            torch.get_autocast_dtype(self.device),
        )

    def read(self, name: str) -> Tensor:
        """Returns the logits. Raises RuntimeError if the weights have changed since the forward pass."""
        if versions(self.parameters) != self.versions:
            raise RuntimeError(
                f"{name} is computed when it is first read, but the weights have changed since the forward pass; "
                "read it before the optimizer's step, or call the model without labels"
            )
        enabled, dtype = self.autocast
        with torch.set_grad_enabled(self.grad), torch.autocast(self.device, dtype, enabled):
            return self.calculate()


def versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass
class CausalLMOutput(ModelOutput):
    """The output of a causal language model.

    Attributes:
        loss: Scalar fp32, the mean over the labels that are not -100; None without labels.
        logits: [B, S, Vp], this rank's columns of the padded vocabulary ([B, S, V] in one process);
            `model.gather_logits` returns [B, S, V]. With labels they are computed when they are first read.
        hidden_states: The embedding output and each block's output, [B, S, H] each (the last one after the final
            norm, as in transformers); None unless requested.
    """

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class EncoderOutput(ModelOutput):
    """The output of an encoder.

    Attributes:
        last_hidden_state: [B, S, H].
        hidden_states: [B, S, H] each; the last one is last_hidden_state. None unless requested.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class Seq2SeqLMOutput(ModelOutput):
    """The output of an encoder-decoder. S is the source length, T the target length.

    Attributes:
        loss, logits: As in `CausalLMOutput`; logits are [B, T, Vp].
        decoder_hidden_states, encoder_hidden_states: The embedding output and each block's output, [B, T, H] and
            [B, S, H] each, the last one after the final norm; None unless requested.
        encoder_last_hidden_state: [B, S, H]; a later call takes it as `encoder_outputs`.
    """

    loss: Tensor | None
    logits: Tensor
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class BaseModelOutput(ModelOutput):
    """The output of a bare model. The fields for encoder-decoders are as in `Seq2SeqLMOutput`.

    Attributes:
        last_hidden_state: [B, S, H].
        pooler_output: [B, H], the pooled state of the first token, of a model that has a pooler.
        hidden_states: The embedding output and each block's output, [B, S, H] each; None unless requested.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class MaskedLMOutput(ModelOutput):
    """The output of a masked language model. Its loss and logits are as in `CausalLMOutput`."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """The output of `PreTraining`.

    Attributes:
        loss: Masked-language-model loss + next-sentence loss; None unless both kinds of labels are given.
        prediction_logits: [B, S, Vp], vocabulary-parallel; with both kinds of labels computed when first read.
        seq_relationship_logits: [B, 2], replicated; class 0 means that the second sentence follows the first.
    """

    loss: Tensor | None
    prediction_logits: Tensor
    seq_relationship_logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class ClassifierOutput(ModelOutput):
    """The output of a classifier. The fields for encoder-decoders are as in `Seq2SeqLMOutput`.

    Attributes:
        loss: Scalar fp32; None without labels.
        logits: [B, num_labels] for sequences, [B, S, num_labels] for tokens, [B, C] for C choices.
    """

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class QuestionAnsweringOutput(ModelOutput):
    """The output of `QuestionAnswering`: a scalar loss, and scores of each position as an answer's ends, [B, S]."""

    loss: Tensor | None
    start_logits: Tensor
    end_logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
