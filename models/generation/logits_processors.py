"""Applies transformers' logits processors and stopping criteria to logits that are split over the
ranks.

The order is that of transformers' `generate`. Rows are gathered only for processors that need
complete rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import transformers.generation.logits_process as p
from torch import Tensor
from transformers.generation.configuration_utils import (
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ...mpu import ParallelMesh
from .settings import GenerationSettings
from .vocabulary import find_best, gather_rows, take_from_first_rank

# These criteria decide alike on every rank.
FUNCTIONS_OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class LogitsProcessors:
    """Changes the scores of the next token, and decides which sequences end.

    Args:
        prompt: int64 [R, T], the beginning of every sequence.
        encoder_ids: [R, S], the encoder's input.
        attention_mask: [R, T] of the prompts.
        processors: The caller's processors. They replace those of the settings that have the same
            class.
        criteria: The caller's stopping criteria, likewise.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        vocab_size: int,
        mesh: ParallelMesh | None,
        *,
        prompt: Tensor,
        limit: int,
        encoder_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        processors: Sequence[Any] = (),
        criteria: Sequence[Any] = (),
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.mesh = mesh
        eos = None
        if settings.eos_token_ids:
            eos = torch.tensor(settings.eos_token_ids, device=prompt.device)
        if encoder_ids is None:
            encoder_ids = prompt
        made = _make_edits(settings, prompt, encoder_ids, attention_mask, eos, limit)
        if prefix_allowed_tokens_fn is not None:
            made.insert(
                0, p.PrefixConstrainedLogitsProcessor(prefix_allowed_tokens_fn, settings.num_beams)
            )
        self.processors: Any = p.LogitsProcessorList(_replace_same_class(made, processors))
        if settings.do_sample:
            self.processors += _make_warpers(settings, eos, prompt.device)
        if settings.watermarking_config is not None:
            self.processors.append(
                _make_watermark(settings.watermarking_config, vocab_size, prompt.device)
            )
        if settings.renormalize_logits:
            self.processors.append(p.LogitNormalization())
        self.needs_rows = any(type(processor) not in _SPLIT for processor in self.processors)
        self.criteria: Any = StoppingCriteriaList(
            _replace_same_class(_make_criteria(settings, eos, limit, tokenizer), criteria)
        )
        self.may_disagree = any(
            type(criterion) not in FUNCTIONS_OF_TOKENS for criterion in self.criteria
        )

    def __call__(self, ids: Any, scores: Any) -> tuple[Tensor, ParallelMesh | None]:
        """Processes scores [R, Vp] of the sequences so far, ids [R, T].

        Returns them with the mesh over which they are still split (None if they were gathered).
        """
        if self.needs_rows:
            return self.processors(ids, gather_rows(scores, self.vocab_size, self.mesh)), None
        for processor in self.processors:
            scores = _SPLIT[type(processor)](processor, scores, self.mesh)
        return scores, self.mesh

    def stops(self, ids: Tensor, scores: tuple[Tensor, ...] | None = None) -> Tensor:
        """Returns which sequences [R, T] end with their last token: bool [R], the same on every
        rank.

        Args:
            scores: Those of the steps so far, [R, V] each, for a caller's criterion that reads
                them.
        """
        stops = self.criteria(ids, scores)
        if self.may_disagree:
            # Clocks differ, and a caller's criterion may be anything.
            stops = take_from_first_rank(stops.to(torch.uint8), self.mesh).bool()
        return stops


class PaddedRepetitionPenalty(p.RepetitionPenaltyLogitsProcessor):
    """Penalizes repeated tokens, but not those of the padding before a prompt.

    Later releases of transformers do so too.

    Args:
        padding: int64 [R], the positions of padding at the beginning of each row.
    """

    def __init__(self, penalty: float, padding: Tensor) -> None:
        super().__init__(penalty)
        self.padding = padding

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        # A row's first token stands for its padding: a token counts once, however often it occurs.
        first = input_ids.gather(1, self.padding[:, None])
        is_token = (
            torch.arange(input_ids.shape[1], device=input_ids.device) >= self.padding[:, None]
        )
        return super().__call__(input_ids.where(is_token, first), scores)


def _keep_best(processor: p.TopKLogitsWarper, scores: Tensor, mesh: ParallelMesh | None) -> Tensor:
    lowest = find_best(scores, processor.top_k, mesh)[0][:, -1:]
    return scores.masked_fill(scores < lowest, processor.filter_value)


# Processors that can work on a part of the vocabulary, with their implementations.
_SPLIT: dict[type, Callable[[Any, Tensor, ParallelMesh | None], Tensor]] = {
    p.TemperatureLogitsWarper: lambda processor, scores, mesh: processor(None, scores),
    p.TopKLogitsWarper: _keep_best,
}


def _make_edits(
    s: GenerationSettings,
    prompt: Tensor,
    encoder_ids: Any,
    mask: Tensor | None,
    eos: Any,
    limit: int,
) -> list[Any]:
    """Returns the processors that every strategy uses."""
    device: Any = prompt.device  # transformers annotates it as a string
    start = prompt.shape[1]
    made: list[Any] = []
    if s.sequence_bias is not None:
        bias: Any = s.sequence_bias
        made.append(p.SequenceBiasLogitsProcessor(bias))
    if s.encoder_repetition_penalty != 1.0:
        made.append(
            p.EncoderRepetitionPenaltyLogitsProcessor(s.encoder_repetition_penalty, encoder_ids)
        )
    if s.repetition_penalty != 1.0:
        padding = None if mask is None else (mask != 0).int().argmax(1)
        if padding is not None and not padding.any():
            padding = None
        penalty = p.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)
        if padding is not None:
            penalty = PaddedRepetitionPenalty(s.repetition_penalty, padding)
        made.append(penalty)
    if s.no_repeat_ngram_size > 0:
        made.append(p.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
    if s.encoder_no_repeat_ngram_size > 0:
        made.append(
            p.EncoderNoRepeatNGramLogitsProcessor(s.encoder_no_repeat_ngram_size, encoder_ids)
        )
    if s.bad_words_ids is not None:
        made.append(p.NoBadWordsLogitsProcessor(s.bad_words_ids, eos))
    if s.min_length > 0 and eos is not None:
        made.append(p.MinLengthLogitsProcessor(s.min_length, eos, device=device))
    if s.min_new_tokens and eos is not None:
        made.append(
            p.MinNewTokensLengthLogitsProcessor(start, s.min_new_tokens, eos, device=device)
        )
    if s.forced_bos_token_id is not None:
        made.append(p.ForcedBOSTokenLogitsProcessor(s.forced_bos_token_id))
    if s.forced_eos_token_id is not None:
        made.append(p.ForcedEOSTokenLogitsProcessor(limit, s.forced_eos_token_id, device=device))
    if s.remove_invalid_values:
        made.append(p.InfNanRemoveLogitsProcessor())
    if s.exponential_decay_length_penalty is not None:
        if eos is None:
            raise ValueError(
                "exponential_decay_length_penalty makes the end token likelier, so it needs "
                "eos_token_id"
            )
        made.append(p.ExponentialDecayLengthPenalty(s.exponential_decay_length_penalty, eos, start))
    if s.suppress_tokens is not None:
        made.append(p.SuppressTokensLogitsProcessor(s.suppress_tokens, device=device))
    if s.begin_suppress_tokens is not None:
        # A forced first token comes before the first one that is generated.
        begin = start
        if start <= 1 and s.forced_bos_token_id is not None:
            begin = start + 1
        made.append(
            p.SuppressTokensAtBeginLogitsProcessor(s.begin_suppress_tokens, begin, device=device)
        )
    return made


def _make_watermark(config: Any, vocab_size: int, device: torch.device) -> Any:
    """Returns the processor of transformers' object, or of its contents, that marks a text."""
    if isinstance(config, Mapping):
        values = dict(cast(Mapping[str, Any], config))
        kinds: list[type] = [WatermarkingConfig, SynthIDTextWatermarkingConfig]
        config = kinds["ngram_len" in values](**values)
    config.validate()
    return config.construct_processor(vocab_size, device)


def _make_warpers(s: GenerationSettings, eos: Tensor | None, device: Any) -> list[Any]:
    """Returns the processors of sampling; for beam search they keep one token besides the end
    tokens.
    """
    least = 1
    if s.num_beams > 1:
        least = 2 if eos is None else len(eos) + 1
    keep = {"min_tokens_to_keep": least}
    made: list[Any] = []
    if s.temperature != 1.0:
        made.append(p.TemperatureLogitsWarper(s.temperature))
    if s.top_h is not None:
        made.append(p.TopHLogitsWarper(top_h=s.top_h))
    if s.top_k != 0:
        made.append(p.TopKLogitsWarper(s.top_k, **keep))
    if s.top_p < 1.0:
        made.append(p.TopPLogitsWarper(s.top_p, **keep))
    if s.min_p is not None:
        made.append(p.MinPLogitsWarper(s.min_p, **keep))
    if s.typical_p < 1.0:
        made.append(p.TypicalLogitsWarper(s.typical_p, **keep))
    if 0.0 < s.epsilon_cutoff < 1.0:
        made.append(p.EpsilonLogitsWarper(s.epsilon_cutoff, **keep))
    if 0.0 < s.eta_cutoff < 1.0:
        made.append(p.EtaLogitsWarper(s.eta_cutoff, **keep, device=device))
    return made


def _make_criteria(s: GenerationSettings, eos: Any, limit: int, tokenizer: Any) -> list[Any]:
    """Returns the criteria that end a sequence."""
    made: list[Any] = [MaxLengthCriteria(limit)]
    if s.max_time is not None:
        made.append(MaxTimeCriteria(s.max_time))
    if s.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: pass tokenizer=…")
        made.append(StopStringCriteria(tokenizer, s.stop_strings))
    if eos is not None:
        made.append(EosTokenCriteria(eos))
    return made


def _replace_same_class(made: list[Any], own: Sequence[Any]) -> list[Any]:
    """Returns what was made, without what has the class of one of the caller's own, and these."""
    replaced: set[Any] = {type(one) for one in own}
    return [one for one in made if replaced.isdisjoint(type(one).__mro__)] + list(own)
