"""What a model's forward returns: Hugging Face's field names, vocabulary-parallel logits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


class ModelOutput:
    """Base of the outputs, dataclasses whose fields that are not None can also be had by position or by name."""

    def keys(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)  # type: ignore[arg-type]

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
        `model.gather_logits` gives [B, S, V].
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
        `model.gather_logits` gives [B, T, V].
    encoder_last_hidden_state: [B, S, H]; what `encoder_outputs` takes.
    decoder_hidden_states, encoder_hidden_states: embedding output and each block's output, [B, T, H] and [B, S, H],
        the last one after the final norm; None unless asked for.
    """

    loss: Tensor | None
    logits: Tensor
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
