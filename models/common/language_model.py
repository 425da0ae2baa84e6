"""Provides what language models share outside their blocks: positions, logits, the loss, and the outputs.

The outputs of a forward pass use Hugging Face's field names. Logits stay vocabulary-parallel.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import (
    ParallelMesh,
    VocabParallelHead,
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    scatter_sequence,
    tp_size,
    vocab_parallel_cross_entropy,
)
from .stack import Body

Generates = Literal["continuation", "answer", "blanks", "masks"]

VOCABULARY_MULTIPLE = 64  # each rank's number of logits is a multiple of it, which makes GPU products much faster
IGNORED = -100  # the label of positions without a prediction


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
            head, hidden, self.targets(labels), table, num_items=num_items_in_batch, sparse_labels=self.sparse_labels
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


class CausalLM(LanguageModel):
    """Base of the models that predict each token from the tokens before it; their logits are vocabulary-parallel."""

    generates = "continuation"

    def targets(self, labels: Tensor) -> Tensor:
        # Shifting the labels instead of the hidden states avoids a copy of the hidden states.
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


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
        sparse_labels: Select the labeled positions on an accelerator too, although the host must wait for it there.

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
        raise ValueError(f"labels {tuple(labels.shape)} do not match the positions {tuple(hidden.shape[:-1])}")
    rows, target = hidden.flatten(0, -2), labels.reshape(-1)
    labeled = target != IGNORED
    count = labeled.sum() if num_items is None else num_items
    if hidden.is_cpu or sparse_labels:
        chosen = labeled.nonzero()[:, 0]
        if len(chosen) < len(target):
            # Without labels, keep one ignored position, so that the gradients are zeros.
            chosen = chosen if len(chosen) else torch.zeros_like(target[:1])
            rows, target = rows[chosen], target[chosen]
    return head.losses(rows, target, table, ignore_index=IGNORED).sum() / count


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

    def forward(self, input: Tensor) -> Tensor:
        """Maps position ids [B, S] to [B, S, H], or [B, S/tp, H] under sequence parallelism."""
        x = super().forward(input)
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
        own = list(self.parameters(recurse=False))  # the weight and perhaps a bias, whose gradients one all-reduce sums
        joined = copy_to_tp(torch.cat([parameter.flatten() for parameter in own]), self.mesh)
        weight, *bias = torch.split(joined, [parameter.numel() for parameter in own])
        return F.linear(input, weight.view_as(self.weight), *bias)


def first_token(x: Tensor, *, sequence_parallel: bool, mesh: ParallelMesh | None) -> Tensor:
    """Returns the first position's hidden state on every rank: [B, S, H], or [B, S/tp, H] -> [B, H]."""
    if sequence_parallel:
        x = gather_sequence(x[:, :1], mesh, partial_grad=False)  # [B, tp, H], each rank's first position
    return x[:, 0]


@dataclass
class ModelOutput:
    """Base of the outputs: dataclasses whose fields, except those that are None, also have an index and a key.

    A field without a default may be `LazyLogits`. Reading it computes it, so all tensor-parallel ranks must read it.
    """

    def __post_init__(self) -> None:
        self._lazy_logits = {name: value for name, value in vars(self).items() if isinstance(value, LazyLogits)}
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
        return tuple(name for name in names if name in self._lazy_logits or getattr(self, name) is not None)

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
        self.autocast = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

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
