"""The outputs of the models, with Hugging Face's field names. Logits stay vocabulary-parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import Self

from .blocks.cache import Cache
from .blocks.padding import Tokens


class BackboneOutput(NamedTuple):
    """What the embeddings and blocks of a model compute for its head.

    Attributes:
        states: The embedding output and each block's output, the last one after the final norm if
            there is one, [B, S, H], or [B, S/tp, H] under sequence parallelism.
        table: The word embedding table for a tied head; see `VocabParallelHead.forward`.
        encoder_states: The same of the encoder, if `states` are those of a decoder that attends to
            it.
        encoder_tokens: If given, the encoder's states are the rows of these tokens, [T, 1, H].
    """

    states: list[Tensor]
    table: Tensor | None
    encoder_states: list[Tensor] | None = None
    encoder_tokens: Tokens | None = None


def absent() -> Any:
    """Returns None, the default of a field that may be a `LazyValue`.

    As a factory, it makes a default that is no attribute of the class.
    """
    return None


@dataclass
class ModelOutput:
    """Base of the outputs: dataclasses that are also used like the outputs of transformers.

    A field that is not None has a key and an index: `output["loss"]`, `output[0]`, `output[:2]`,
    `"loss" in output`, `output.items()`. Iteration yields the keys, as in transformers; `to_tuple`
    returns the values. The fields that transformers' output has for the same class are there, None
    if they are absent. The classes are nodes for PyTorch's trees, and instances can be pickled.

    `past_key_values` is also read as `cache`, its name in transformers 5.24 and later.

    A field with `absent` as its default factory may be a `LazyValue`. Reading `LazyLogits` computes
    them, so all tensor-parallel ranks must read them.
    """

    def __init_subclass__(cls) -> None:
        def unflatten(values: Iterable[Any], names: Iterable[str]) -> Any:
            return cls(**dict(zip(names, values, strict=True)))

        name = f"{cls.__module__}.{cls.__qualname__}"
        cast(Any, pytree).register_pytree_node(
            cls, cls._flatten, unflatten, serialized_type_name=name
        )

    def __post_init__(self) -> None:
        first = vars(self)[fields(self)[0].name]
        if isinstance(first, Mapping):
            # Like transformers' outputs, all fields may be given as one mapping.
            setattr(self, fields(self)[0].name, None)
            for name, value in cast(Mapping[str, Any], first).items():
                self[name] = value
        self._lazy_values: dict[str, LazyValue] = {}
        for name, value in tuple(vars(self).items()):
            if isinstance(value, LazyValue):
                self.defer(name, value)

    def defer(self, name: str, value: LazyValue) -> None:
        """Sets a field to a value that is made when it is first read."""
        vars(self).pop(name, None)
        self._lazy_values[name] = value

    def __getattr__(self, name: str) -> Any:
        deferred = vars(self).get("_lazy_values", {})
        if name == "cache" and any(field.name == "past_key_values" for field in fields(self)):
            return self.past_key_values
        if name not in deferred:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = deferred[name].read(name)
        del deferred[name]
        setattr(self, name, value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        for name in tuple(self._lazy_values):
            getattr(self, name)
        return vars(self)

    def keys(self) -> tuple[str, ...]:
        names = [field.name for field in fields(self)]
        names += vars(self).get("_added_names", ())
        lazy = self._lazy_values
        return tuple(name for name in names if name in lazy or getattr(self, name) is not None)

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.keys())

    def items(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, getattr(self, name)) for name in self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, self._find_key(key)) if key in self else default

    def to_tuple(self) -> tuple[Any, ...]:
        return self.values()

    def __contains__(self, key: object) -> bool:
        return self._find_key(key) in self.keys()

    def _find_key(self, key: Any) -> Any:
        """Returns the key of the field that `key` names."""
        return "past_key_values" if key == "cache" else key

    def __getitem__(self, key: int | slice | str) -> Any:
        names = self.keys()
        key = self._find_key(key)
        if isinstance(key, slice):
            return tuple(getattr(self, name) for name in names[key])
        if not isinstance(key, str):
            return getattr(self, names[key])
        if key not in names:
            raise KeyError(key)
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Replaces the value of a field, or adds one, as transformers' pipelines do."""
        key = self._find_key(key)
        if key not in {field.name for field in fields(self)}:
            added: dict[str, None] = vars(self).setdefault("_added_names", {})
            added[key] = None
        vars(self).get("_lazy_values", {}).pop(key, None)
        setattr(self, key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    @classmethod
    def from_output(cls, output: ModelOutput, **changes: Any) -> Self:
        """Returns an output with the fields of another one, which may be lazy, and changes."""
        values, names = output._flatten()
        return cls(**{**dict(zip(names, values, strict=True)), **changes})

    def _flatten(self) -> tuple[list[Any], list[str]]:
        """Returns the values and the names of the fields, without computing lazy logits."""
        names = list(self.keys())
        lazy = self._lazy_values
        return [lazy[name] if name in lazy else getattr(self, name) for name in names], names


class LazyValue:
    """A value of an output that is made only when it is read."""

    def read(self, name: str) -> Any:
        """Returns the value of the field `name`."""
        raise NotImplementedError


class LazyPast(LazyValue):
    """A cache of transformers, made of the keys and values that a call has computed."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def read(self, name: str) -> Any:
        return self.cache.to_transformers()


class LazyLogits(LazyValue):
    """Logits that are computed only when they are read.

    The computation uses the gradient mode and the autocast setting of the forward pass.
    `parameters` must not change between the forward pass and the reading.
    """

    def __init__(self, calculate: Callable[[], Tensor], parameters: Iterable[Tensor]) -> None:
        self.calculate = calculate
        self.parameters = tuple(parameters)
        self.versions = versions(self.parameters)
        self.grad = torch.is_grad_enabled()
        self.device = self.parameters[0].device.type
        self.autocast = (
            torch.is_autocast_enabled(self.device),
            torch.get_autocast_dtype(self.device),
        )

    def reshaped(self, rows: Sequence[int]) -> LazyLogits:
        """Returns the same logits with these sizes in place of the first one."""
        calculate = self.calculate
        self.calculate = lambda: torch.unflatten(calculate(), 0, tuple(rows))
        return self

    def read(self, name: str) -> Tensor:
        """Returns the logits. Raises RuntimeError if the weights have changed since the forward
        pass.
        """
        if versions(self.parameters) != self.versions:
            raise RuntimeError(
                f"{name} is computed when it is first read, but the weights have changed since "
                "the forward pass; "
                "read it before the optimizer's step, or call the model without labels"
            )
        enabled, dtype = self.autocast
        with torch.set_grad_enabled(self.grad), torch.autocast(self.device, dtype, enabled):
            return self.calculate()


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Returns how often each tensor has been changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass
class StageOutput(ModelOutput):
    """The output of a pipeline stage that is not the last: the loss is a zero, and there are no
    logits.

    The hidden states have been handed to the next stage.
    """

    loss: Tensor


@dataclass
class CausalLMOutput(ModelOutput):
    """The output of a causal language model.

    Attributes:
        loss: Scalar fp32, the mean over the labels that are not -100; None without labels.
        logits: [B, S, Vp], this rank's columns of the padded vocabulary ([B, S, V] in one process);
            `model.gather_logits` returns [B, S, V]. With labels they are computed when they are
            first read.
        past_key_values: The cache, of transformers, with the keys and values of this rank's heads,
            unless `use_cache` or the configuration says no. In training and beside labels there is
            one only if the call asks for it.
        hidden_states: The embedding output and each block's output, [B, S, H] each (the last one
            after the final norm, as in transformers); None unless requested.
        attentions: Each block's attention probabilities, [B, N, S, S]; None unless requested.
        cross_attentions: The same of the attention to an encoder's output, [B, N, S, T].
    """

    loss: Tensor | None = None
    logits: Tensor = field(default_factory=absent)
    past_key_values: Any = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None


@dataclass
class MoeCausalLMOutput(CausalLMOutput):
    """The output of a causal language model with mixtures of experts.

    Attributes:
        aux_loss: Scalar fp32, the auxiliary loss, which `loss` contains times its factor.
        router_logits: The routers' scores of each layer, [B S, E].
    """

    aux_loss: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None

    # transformers' order.
    ORDER: ClassVar[tuple[str, ...]] = (
        "loss",
        "aux_loss",
        "logits",
        "past_key_values",
        "hidden_states",
        "attentions",
        "router_logits",
    )

    def keys(self) -> tuple[str, ...]:
        names = super().keys()
        return tuple(sorted(names, key=self._place))

    def _place(self, name: str) -> int:
        return self.ORDER.index(name) if name in self.ORDER else len(self.ORDER)


@dataclass
class EncoderOutput(ModelOutput):
    """The output of an encoder.

    Attributes:
        last_hidden_state: [B, S, H].
        hidden_states: [B, S, H] each; the last one is last_hidden_state. None unless requested.
        attentions: As in `CausalLMOutput`.
    """

    last_hidden_state: Tensor = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class Seq2SeqLMOutput(ModelOutput):
    """The output of an encoder-decoder. S is the source length, T the target length.

    Attributes:
        loss, logits, past_key_values: As in `CausalLMOutput`; logits are [B, T, Vp].
        decoder_hidden_states, encoder_hidden_states: The embedding output and each block's output,
            [B, T, H] and [B, S, H] each, the last one after the final norm; None unless requested.
        decoder_attentions, cross_attentions, encoder_attentions: Each block's attention
            probabilities, [B, N, T, T], [B, N, T, S] and [B, N, S, S]; None unless requested.
        encoder_last_hidden_state: [B, S, H]; a later call takes it as `encoder_outputs`.
    """

    loss: Tensor | None = None
    logits: Tensor = field(default_factory=absent)
    past_key_values: Any = field(default_factory=absent)
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None


@dataclass
class BaseModelOutput(ModelOutput):
    """The output of a bare model.

    The fields for encoder-decoders are as in `Seq2SeqLMOutput`, the others but the following as in
    `CausalLMOutput`.

    Attributes:
        last_hidden_state: [B, S, H].
        pooler_output: [B, H], the pooled state of the first token, of a model that has a pooler.
    """

    last_hidden_state: Tensor = field(default_factory=absent)
    pooler_output: Tensor | None = None
    past_key_values: Any = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None


@dataclass
class MoeModelOutput(BaseModelOutput):
    """The output of a bare model with mixtures of experts.

    Attributes:
        router_logits: The routers' scores of each layer, [B S, E].
    """

    router_logits: tuple[Tensor, ...] | None = None


@dataclass
class MoeSeq2SeqLMOutput(Seq2SeqLMOutput):
    """The output of an encoder-decoder with mixtures of experts.

    Attributes:
        encoder_z_loss, decoder_z_loss, encoder_aux_loss, decoder_aux_loss: Scalars fp32, the
            auxiliary losses of each stack, which `loss` contains times their factors.
        encoder_router_logits, decoder_router_logits: The routers' scores of each sparse layer.
    """

    encoder_z_loss: Tensor | None = None
    decoder_z_loss: Tensor | None = None
    encoder_aux_loss: Tensor | None = None
    decoder_aux_loss: Tensor | None = None
    encoder_router_logits: tuple[Tensor, ...] | None = None
    decoder_router_logits: tuple[Tensor, ...] | None = None

    # transformers' order.
    ORDER: ClassVar[tuple[str, ...]] = (
        "loss",
        "logits",
        "encoder_z_loss",
        "decoder_z_loss",
        "encoder_aux_loss",
        "decoder_aux_loss",
        "past_key_values",
        "decoder_hidden_states",
        "decoder_attentions",
        "decoder_router_logits",
        "cross_attentions",
        "encoder_last_hidden_state",
        "encoder_hidden_states",
        "encoder_attentions",
        "encoder_router_logits",
    )

    def keys(self) -> tuple[str, ...]:
        return tuple(sorted(super().keys(), key=self._place))

    def _place(self, name: str) -> int:
        return self.ORDER.index(name) if name in self.ORDER else len(self.ORDER)


@dataclass
class MoeSeq2SeqModelOutput(BaseModelOutput):
    """The output of an encoder-decoder with mixtures of experts and without a head.

    Attributes:
        encoder_router_logits, decoder_router_logits: The routers' scores of each sparse layer.
    """

    encoder_router_logits: tuple[Tensor, ...] | None = None
    decoder_router_logits: tuple[Tensor, ...] | None = None


@dataclass
class MaskedLMOutput(ModelOutput):
    """The output of a masked language model. Its fields are as in `CausalLMOutput`."""

    loss: Tensor | None = None
    logits: Tensor = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """The output of `PreTraining`.

    Attributes:
        loss: Masked-language-model loss + next-sentence loss; None unless both kinds of labels are
            given.
        prediction_logits: [B, S, Vp], vocabulary-parallel; with both kinds of labels computed when
            first read.
        seq_relationship_logits: [B, 2], replicated; class 0 means that the second sentence follows
            the first.
        hidden_states, attentions: As in `CausalLMOutput`.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor = field(default_factory=absent)
    seq_relationship_logits: Tensor = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class ClassifierOutput(ModelOutput):
    """The output of a classifier.

    The fields for encoder-decoders are as in `Seq2SeqLMOutput`, the others but the following as in
    `CausalLMOutput`.

    Attributes:
        loss: Scalar fp32; None without labels.
        logits: [B, num_labels] for sequences, [B, S, num_labels] for tokens, [B, C] for C choices.
        predictions: The most probable labels of tokens, int64 [B, S], -100 where none is predicted,
            of a model with a conditional random field in evaluation mode; else None.
    """

    loss: Tensor | None = None
    logits: Tensor = field(default_factory=absent)
    past_key_values: Any = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    predictions: Tensor | None = None


@dataclass
class QuestionAnsweringOutput(ModelOutput):
    """The output of `QuestionAnswering`: a scalar loss, and scores of each position as an answer's
    ends, [B, S]. The other fields are as in `ClassifierOutput`.
    """

    loss: Tensor | None = None
    start_logits: Tensor = field(default_factory=absent)
    end_logits: Tensor = field(default_factory=absent)
    past_key_values: Any = field(default_factory=absent)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
