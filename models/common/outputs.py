"""What a model's forward returns: Hugging Face's field names, vocabulary-parallel logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


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
        names = (field.name for field in fields(self))  # type: ignore[arg-type]
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
