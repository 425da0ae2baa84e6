"""Gives the models their `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from ..blocks.stack import BlockList
from .generation_config import GenerationConfig

if TYPE_CHECKING:
    from .generate import GenerateOutput

Generates = Literal["continuation", "answer", "blanks", "masks"]


class GenerationMixin:
    """A base of the models that generate tokens."""

    generates: ClassVar[Generates]
    """What the model generates: the continuation of a prompt, an encoder-decoder's answer to a
    prompt, the text of blanks, or the tokens at masked positions."""

    _generation_config: GenerationConfig | None = None

    @property
    def generation_config(self) -> GenerationConfig:
        """The settings of `generate` that a call does not name.

        They are those of the folder from which the model was loaded, or else of its configuration.
        """
        if self._generation_config is None:
            self._generation_config = GenerationConfig.from_config(cast(Any, self).config)
        return self._generation_config

    @generation_config.setter
    def generation_config(self, settings: Any) -> None:
        self._generation_config = GenerationConfig.from_object(settings)

    @property
    def decoder_blocks(self) -> BlockList:
        """The blocks that read the generated tokens."""
        return cast(Any, self).blocks

    def generate(
        self, inputs: Tensor | None = None, attention_mask: Any = None, **options: Any
    ) -> Tensor | GenerateOutput:
        """Generates sequences, like transformers' `generate`; see `shardzoo.generation.generate`
        for the options.

        Args:
            inputs: int64 [B, S]; `input_ids` is another name.
            attention_mask: [B, S]. The second argument by position may also be transformers'
                `generation_config`, which is second there.
        """
        from .generate import generate

        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            if "generation_config" in options:
                raise TypeError("generate got two values for generation_config")
            options["generation_config"] = attention_mask
            attention_mask = options.pop("attention_mask", None)
        if "input_ids" in options:
            if inputs is not None:
                raise ValueError("inputs and input_ids are the same argument: pass one of them")
            inputs = options.pop("input_ids")
        return generate(self, inputs, attention_mask, **options)

    def compute_transition_scores(
        self,
        sequences: Tensor,
        scores: Sequence[Tensor],
        beam_indices: Tensor | None = None,
        normalize_logits: bool = False,
    ) -> Tensor:
        """Returns the score of each generated token when it was chosen, as transformers does.

        Args:
            sequences, scores, beam_indices: Fields of what `generate` returned with
                output_scores=True.
            normalize_logits: Whether to return log-probabilities.

        Returns:
            fp32 [B · num_return_sequences, T], T generated tokens; 0 after the end of a sequence
            of beam search.
        """
        steps = torch.stack(list(scores))  # [T, R, V]
        if normalize_logits:
            steps = steps.log_softmax(-1)
        if beam_indices is None:
            rows = torch.arange(steps.shape[1], device=sequences.device)[:, None]
            beam_indices = rows.expand(-1, len(steps))
        is_after_end = beam_indices < 0
        longest = int((~is_after_end).sum(-1).max())
        is_after_end = is_after_end[:, :longest]
        rows = beam_indices[:, :longest].masked_fill(is_after_end, 0).long()
        tokens = sequences[:, sequences.shape[1] - longest :]
        step = torch.arange(longest, device=sequences.device).expand_as(tokens)
        return steps[step, rows, tokens].masked_fill(is_after_end, 0)
