"""Gives the models their `generate`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from ..blocks.stack import BlockList
from .generation_config import GenerationConfig

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateOutput

Generates = Literal["continuation", "answer", "blanks", "masks"]


class GenerationMixin:
    """A base of the models that generate tokens."""

    generates: ClassVar[Generates]
    """What the model generates: the continuation of a prompt, an encoder-decoder's answer to a
    prompt, the text of blanks, or the tokens at masked positions."""

    returns_whole_logits: bool = False
    """Whether outputs have the logits of the whole vocabulary on every tensor-parallel rank, as
    `from_pretrained(tp_plan="auto")` promises."""

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

    @contextmanager
    def keeping_logits_split(self) -> Generator[None]:
        """A context in which outputs have this rank's columns of the logits in any case."""
        before = self.returns_whole_logits
        self.returns_whole_logits = False
        try:
            yield
        finally:
            self.returns_whole_logits = before

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

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor | None,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        cache: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Returns the arguments of a forward pass, for a decoding loop written for transformers.

        `generate` prepares its own.

        Args:
            input_ids: int64 [B, T], all tokens so far; of an encoder-decoder the decoder's.
            next_sequence_length: The number of last tokens to read; by default all.
            inputs_embeds: [B, S, H], read instead in the first step.
            cache: past_key_values, by the name of transformers 5.24 and later.
        """
        is_seq2seq = self.generates == "answer"
        prefix = "decoder_" if is_seq2seq else ""
        prepared: dict[str, Any] = {}
        if inputs_embeds is not None and is_first_iteration and not is_seq2seq:
            prepared["inputs_embeds"] = inputs_embeds
        elif input_ids is not None:
            start = 0 if next_sequence_length is None else -next_sequence_length
            prepared[f"{prefix}input_ids"] = input_ids[:, start:].contiguous()
        prepared["past_key_values"] = past_key_values
        prepared["cache"] = cache
        prepared["attention_mask"] = attention_mask
        options.pop("labels", None)
        prepared.update(options)
        return {name: value for name, value in prepared.items() if value is not None}

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
