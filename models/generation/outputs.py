"""What the steps of `generate` leave for its output, which is of transformers' own class.

The fields of `GenerateDecoderOnlyOutput`, `GenerateEncoderDecoderOutput` and their `Beam` variants
are those of transformers. There are as many `scores` and `logits` as steps, each [R, V] with the
whole vocabulary on every rank, for the R rows that are decoded; the encoder's states have a row for
each prompt; `past_key_values` has this rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...mpu import ParallelMesh
from ..blocks.cache import Cache, TransformersCache
from .vocabulary import gather_rows

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateOutput


@dataclass(frozen=True)
class OutputSettings:
    """The arguments of `generate` that say what it returns, with transformers' names."""

    return_dict_in_generate: bool = False
    """Return an output of transformers, without which the others have no effect."""
    output_scores: bool = False
    """With the scores of each step, after the processors."""
    output_logits: bool = False
    """With the logits of each step."""
    output_hidden_states: bool = False
    """With the hidden states of each step's forward pass."""
    output_attentions: bool = False
    """With the attention weights of each step's forward pass."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not isinstance(value, bool):
                raise ValueError(f"{entry.name} must be true or false, not {value!r}")


@dataclass
class Decoded:
    """What a strategy has found.

    Attributes:
        sequences: int64 [B · num_return_sequences, T].
        sequences_scores: fp32, the score of each sequence, with beams.
        beam_indices: int32, the row whose scores each token was chosen from, -1 after the end; None
            after diverse beam search.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    beam_indices: Tensor | None = None


@dataclass
class StepRecord:
    """Keeps what the steps of one call compute, as far as the call asks for it, and the cache of
    transformers that it leaves: a `StaticCache` if `is_static`.
    """

    wanted: OutputSettings
    scores: list[Tensor] = field(default_factory=list[Tensor])
    logits: list[Tensor] = field(default_factory=list[Tensor])
    hidden_states: list[tuple[Tensor, ...]] = field(default_factory=list[tuple[Tensor, ...]])
    attentions: list[Any] = field(default_factory=list[Any])
    cross_attentions: list[Any] = field(default_factory=list[Any])
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None
    is_static: bool = False
    past: Any = None

    def keep_past(self, cache: Cache, rows: int, config: Any) -> None:
        """Keeps the cache that a call leaves, of `rows` sequences, as one of transformers."""
        own = None
        if self.is_static and not isinstance(cache, TransformersCache):
            from transformers import AutoConfig, StaticCache

            make: Any = AutoConfig.for_model  # type: ignore[reportUnknownMemberType]
            own = StaticCache(make(**config.to_dict()), cache.layers[0].capacity)
        self.past = cache.to_transformers(rows, own)

    def forward_options(self) -> dict[str, Any]:
        """Returns what the forward passes must be asked for."""
        options: dict[str, Any] = {}
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(self.wanted, name):
                options[name] = True
        return options

    def add_states(self, output: Any, copies: int) -> None:
        """Keeps the states of a forward pass, each row of them `copies` times."""
        if self.wanted.output_hidden_states:
            states = output.get("decoder_hidden_states", output.get("hidden_states"))
            self.hidden_states.append(_repeat_rows(states, copies))
        if self.wanted.output_attentions:
            weights = output.get("decoder_attentions", output.get("attentions"))
            self.attentions.append(_repeat_rows(weights, copies))
            if output.get("cross_attentions") is not None:
                rows = len(weights[0])
                cross = [_separate_rows(part, rows) for part in output["cross_attentions"]]
                self.cross_attentions.append(_repeat_rows(cross, copies))

    def split_states(self, drafted: int, new: int) -> None:
        """Replaces the states of the last forward pass by one entry for each of `new` tokens.

        Args:
            drafted: The number of drafted tokens that the pass has read, after what each pass
                reads.
        """
        for kept in (self.hidden_states, self.attentions, self.cross_attentions):
            if not kept:
                continue
            states = kept.pop()
            # Hidden states are [1, S, H], attention weights [1, N, S, T].
            dim = states[0].dim() - 2
            first = states[0].shape[dim] - drafted
            for number in range(new):
                start = 0 if number == 0 else first + number - 1
                rows = [part.narrow(dim, start, first + number - start) for part in states]
                if kept is self.attentions:
                    # Without the keys of later drafted tokens.
                    keys = rows[0].shape[-1] - drafted + number
                    rows = [part[..., :keys] for part in rows]
                kept.append(tuple(rows))

    def add_encoder(self, states: Any, attentions: Any) -> None:
        """Keeps the states and the attention weights of the encoder, as far as they are known."""
        if self.wanted.output_hidden_states:
            self.encoder_hidden_states = states
        if self.wanted.output_attentions:
            self.encoder_attentions = attentions

    def add_logits(self, logits: Tensor, vocab_size: int, mesh: ParallelMesh | None) -> None:
        """Keeps a step's logits [R, Vp] before they are processed. Collective."""
        if self.wanted.output_logits:
            self.logits.append(gather_rows(logits, vocab_size, mesh).clone())

    def add_scores(self, scores: Tensor, vocab_size: int, split_over: ParallelMesh | None) -> None:
        """Keeps a step's processed scores [R, Vp], which are split over a mesh. Collective."""
        if self.wanted.output_scores:
            self.scores.append(gather_rows(scores, vocab_size, split_over).clone())

    @property
    def scores_so_far(self) -> tuple[Tensor, ...] | None:
        """The scores as a stopping criterion of transformers gets them."""
        return tuple(self.scores) if self.wanted.output_scores else None

    def make_output(self, found: Decoded, *, has_encoder: bool, has_beams: bool) -> GenerateOutput:
        """Returns what the call returns."""
        # It takes seconds to import, and only code that is written for it asks for an output.
        from transformers.generation import utils

        named = {entry.name for entry in fields(utils.GenerateDecoderOnlyOutput)}
        past = "cache" if "cache" in named else "past_key_values"  # before transformers 5.24
        values: dict[str, Any] = {
            "scores": self.scores_so_far,
            "logits": tuple(self.logits) if self.wanted.output_logits else None,
            past: self.past,
        }
        states = tuple(self.hidden_states) if self.wanted.output_hidden_states else None
        weights = tuple(self.attentions) if self.wanted.output_attentions else None
        if has_beams:
            values["sequences_scores"] = found.sequences_scores
            values["beam_indices"] = found.beam_indices
        made: Any
        if not has_encoder:
            values |= {"hidden_states": states, "attentions": weights}
            made = utils.GenerateDecoderOnlyOutput
            if has_beams:
                made = utils.GenerateBeamDecoderOnlyOutput
            return made(found.sequences, **values)
        values |= {
            "encoder_hidden_states": self.encoder_hidden_states,
            "encoder_attentions": self.encoder_attentions,
            "decoder_hidden_states": states,
            "decoder_attentions": weights,
            "cross_attentions": tuple(self.cross_attentions) if weights is not None else None,
        }
        made = utils.GenerateEncoderDecoderOutput
        if has_beams:
            made = utils.GenerateBeamEncoderDecoderOutput
        return made(found.sequences, **values)


def _separate_rows(weights: Tensor, rows: int) -> Tensor:
    """Returns the attention to an encoder's output for each row of the decoder, [R, N, S, T].

    The rows of a prompt attend to it together, [B, N, R/B · S, T].
    """
    if len(weights) == rows:
        return weights
    of_a_prompt = rows // len(weights)
    return torch.unflatten(weights, 2, (of_a_prompt, -1)).transpose(1, 2).flatten(0, 1)


def _repeat_rows(tensors: Sequence[Tensor], copies: int) -> tuple[Tensor, ...]:
    if copies == 1:
        return tuple(tensors)
    return tuple(tensor.repeat_interleave(copies, 0) for tensor in tensors)
