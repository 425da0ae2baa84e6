"""What language models share around their blocks: positions, logits, the loss, and the outputs of a forward pass.

Outputs have Hugging Face's field names; logits stay vocabulary-parallel.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves the types of many of its methods open)
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
from .parallel_config import ParallelConfig

Generates = Literal["continuation", "answer", "blanks", "masks"]

VOCABULARY_MULTIPLE = 64  # a rank's logits are this aligned, which GPUs multiply much faster
IGNORED = -100  # a label that asks for no prediction


class LanguageModel(nn.Module):
    """Base of the models whose logits at a position are for the label at that position (masked language models,
    decoders whose labels are aligned); their logits are vocabulary-parallel."""

    config: Any  # the family's ModelConfig
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


class CausalLM(LanguageModel):
    """Base of the models that predict each token from those before it; their logits are vocabulary-parallel."""

    generates = "continuation"

    def targets(self, labels: Tensor) -> Tensor:
        # Shifting the labels, not the hidden states, keeps those contiguous and uncopied.
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


class Seq2SeqLM(LanguageModel):
    """Base of the encoder-decoders; the label at a position is what the decoder predicts there.

    `config` has `pad_token_id` and `decoder_start_token_id`.
    """

    generates = "answer"

    def decoder_inputs(self, decoder_input_ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """The given ids, else the labels moved one to the right. ValueError with neither."""
        if decoder_input_ids is not None:
            return decoder_input_ids
        if labels is None:
            raise ValueError("pass labels, or decoder_input_ids for logits without a loss")
        return self.prepare_decoder_input_ids_from_labels(labels)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """int64 [B, T]: the start token, then all labels but the last; -100 becomes padding."""
        ids = labels.roll(1, dims=1)
        ids[:, 0] = self.config.decoder_start_token_id
        return ids.masked_fill(ids == IGNORED, self.config.pad_token_id)


def head_loss(
    head: VocabParallelHead,
    hidden: Tensor,
    labels: Tensor,
    table: Tensor | None = None,
    *,
    num_items: Tensor | int | None = None,
    sparse_labels: bool = False,
) -> Tensor:
    """Cross-entropy of the head's logits with labels int64 [B, S], of which -100 is ignored: their mean, NaN of none,
    or their sum divided by `num_items`. fp32.

    hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism. table: see `VocabParallelHead.forward`.
    sparse_labels: look for the labeled positions on an accelerator too, where the host has to wait for the answer.
    ValueError for shapes that do not match and for labels outside the vocabulary.
    """
    if torch.compiler.is_compiling():  # a compiler traces neither gradients written over logits nor a number of rows
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
            chosen = chosen if len(chosen) else torch.zeros_like(target[:1])  # an ignored one, for zero gradients
            rows, target = rows[chosen], target[chosen]
    return head.losses(rows, target, table, ignore_index=IGNORED).sum() / count


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

    def forward(self, input: Tensor) -> Tensor:
        """Position ids [B, S] -> [B, S, H], or [B, S/tp, H]"""
        x = super().forward(input)
        return scatter_sequence(x, self.mesh) if self.sequence_parallel else x


class ReplicatedLinear(nn.Linear):
    """y = x Wᵀ + b with the same weight on every rank.

    sequence_parallel: the input is this rank's part of the sequence, so the parameters' gradients are summed over
    the tensor-parallel ranks. Input [..., in], output [..., out].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.sequence_parallel, self.mesh = sequence_parallel, mesh

    def forward(self, input: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return F.linear(input, self.weight, self.bias)
        joined = torch.cat([self.weight.flatten(), self.bias])  # one all-reduce of the gradient for both
        weight, bias = torch.split(copy_to_tp(joined, self.mesh), [self.weight.numel(), self.bias.numel()])
        return F.linear(input, weight.view_as(self.weight), bias)


def first_token(x: Tensor, *, sequence_parallel: bool, mesh: ParallelMesh | None) -> Tensor:
    """The first position's hidden state, on every rank: [B, S, H], or [B, S/tp, H] -> [B, H]"""
    if sequence_parallel:
        x = gather_sequence(x[:, :1], mesh, partial_grad=False)  # [B, tp, H], each rank's first position
    return x[:, 0]


@dataclass
class ModelOutput:
    """Base of the outputs, dataclasses whose fields that are not None can also be had by position or by name.

    A field without a default may be `LazyLogits`; reading it calculates it, on all tensor-parallel ranks together.
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
    """A result of a forward pass that is calculated if somebody reads it.

    That is later, so gradient mode and autocast are those of the forward pass, and `parameters` must not have changed.
    """

    def __init__(self, calculate: Callable[[], Tensor], parameters: Iterable[Tensor]) -> None:
        self.calculate, self.parameters = calculate, tuple(parameters)
        self.versions = versions(self.parameters)
        self.grad = torch.is_grad_enabled()
        self.device = self.parameters[0].device.type
        self.autocast = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def read(self, name: str) -> Tensor:
        """RuntimeError if an optimizer's step has changed the weights meanwhile."""
        if versions(self.parameters) != self.versions:
            raise RuntimeError(
                f"{name} is calculated when it is first read, and the weights have changed since the forward pass: "
                "read it before the optimizer's step, or call the model without labels"
            )
        enabled, dtype = self.autocast
        with torch.set_grad_enabled(self.grad), torch.autocast(self.device, dtype, enabled):
            return self.calculate()


def versions(tensors: Iterable[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass
class CausalLMOutput(ModelOutput):
    """Result of a causal language model.

    loss: scalar fp32, mean over the labels that are not -100; None without labels.
    logits: [B, S, Vp], this rank's columns of the padded vocabulary ([B, S, V] in one process);
        `model.gather_logits` gives [B, S, V]. With labels they are calculated when first read.
    hidden_states: the embedding output and each block's output, [B, S, H] each (the last one after the final
        norm, as in transformers); None unless asked for.
    """

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class EncoderOutput(ModelOutput):
    """last_hidden_state: [B, S, H]. hidden_states: the last one is last_hidden_state; None unless asked for."""

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class Seq2SeqLMOutput(ModelOutput):
    """Result of an encoder-decoder. S: source length; T: target length.

    loss: scalar fp32, mean over the labels that are not -100; None without labels.
    logits: [B, T, Vp], this rank's columns of the padded vocabulary ([B, T, V] in one process);
        `model.gather_logits` gives [B, T, V]. With labels they are calculated when first read.
    encoder_last_hidden_state: [B, S, H]; what `encoder_outputs` takes.
    decoder_hidden_states, encoder_hidden_states: embedding output and each block's output, [B, T, H] and [B, S, H],
        the last one after the final norm; None unless asked for.
    """

    loss: Tensor | None
    logits: Tensor
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
