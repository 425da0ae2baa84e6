"""Diverse beam search (Vijayakumar et al., 2016, arXiv:1610.02424): groups of beams that avoid each other's tokens.

transformers removed it in release 4.57. Scores, order and stopping are those of its last releases with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..mpu import ParallelMesh, tp_rank
from .beams import NEVER
from .decoders import Decoder
from .logits_processors import LogitsProcessors
from .settings import GenerationSettings
from .vocabulary import best, log_probabilities


@dataclass
class _Hypotheses:
    """The finished sequences of one group of one prompt, at most `size` of them."""

    size: int
    settings: GenerationSettings
    kept: list[tuple[float, Tensor]] = field(default_factory=list)
    is_done: bool = False

    @property
    def worst(self) -> float:
        return min(score for score, _ in self.kept)

    def add(self, sequence: Tensor, score: float) -> None:
        if len(self.kept) >= self.size:
            if score <= self.worst:
                return
            self.kept.remove(min(self.kept, key=lambda one: one[0]))
        self.kept.append((score, sequence))

    def check(self, best_running: float, length: int, longest: int) -> None:
        """length, longest: of a hypothesis now and at the end, without the prompt."""
        if len(self.kept) < self.size:
            return
        penalty = self.settings.length_penalty
        at = longest if self.settings.early_stopping == "never" and penalty > 0 else length
        self.is_done |= self.settings.early_stopping is True or self.worst >= best_running / at**penalty


def group_beam_search(
    decoder: Decoder, ids: Tensor, limit: int, settings: GenerationSettings, processors: LogitsProcessors
) -> tuple[Tensor, Tensor]:
    """As `beam_search`, for settings with `num_beam_groups` > 1."""
    n, groups = settings.num_beams, settings.num_beam_groups
    size, prompt, batch = n // groups, ids.shape[1], len(ids) // n
    hypotheses = [[_Hypotheses(size, settings) for _ in range(groups)] for _ in range(batch)]
    scores = torch.full((batch, groups, size), NEVER, device=ids.device)
    scores[:, :, 0] = 0
    beams = ids.unflatten(0, (batch, groups, size))  # [B, G, n/G, T]
    while beams.shape[-1] < limit:
        flat = beams.flatten(0, 2)
        logs = log_probabilities(decoder(flat), decoder.model.mesh).unflatten(0, (batch, groups, size))
        tokens = ids.new_zeros(batch, groups, size)
        origins = ids.new_zeros(batch, groups, size)
        for group in range(groups):
            avoided = _subtract_chosen(logs[:, group], tokens[:, :group].flatten(1), settings, decoder.model.mesh)
            processed, over = processors(beams[:, group].flatten(0, 1), avoided.flatten(0, 1))
            step = _candidates(processed, scores[:, group], settings, over)
            for row in range(batch):
                _advance(hypotheses[row][group], [part[row] for part in step], beams[row, group], prompt, limit,
                         scores[row, group], tokens[row, group], origins[row, group])  # fmt: skip
        chosen = origins[..., None].expand_as(beams)
        beams = torch.cat([beams.gather(2, chosen), tokens[..., None]], -1)
        first = torch.arange(batch * groups, device=ids.device).view(batch, groups, 1) * size
        if all(one.is_done for row in hypotheses for one in row) or processors.stops(beams.flatten(0, 2)).all():
            break
        decoder.select((origins + first).flatten())
    return _finalize(hypotheses, beams, scores, prompt, limit, settings)


def _subtract_chosen(logs: Tensor, chosen: Tensor, settings: GenerationSettings, mesh: ParallelMesh | None) -> Tensor:
    """Scores [B, n/G, Vp] less `diversity_penalty` for each time that an earlier group chose the token ([B, k])."""
    column = chosen - tp_rank(mesh) * logs.shape[-1]
    here = (column >= 0) & (column < logs.shape[-1])
    counts = logs.new_zeros(logs.shape[0], logs.shape[-1])
    counts.scatter_add_(1, column.where(here, 0), here.to(logs.dtype))
    return logs - settings.diversity_penalty * counts[:, None]


def _candidates(
    processed: Tensor, running: Tensor, settings: GenerationSettings, mesh: ParallelMesh | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of a group: scores, tokens and beams, [B, k] each."""
    size = running.shape[1]
    keep = max(2, 1 + len(settings.eos_token_ids)) * size
    values, tokens = best(processed, keep, mesh)  # [B · n/G, k]
    values = (values.unflatten(0, (-1, size)) + running[..., None]).flatten(1)
    values, order = values.topk(min(keep, values.shape[1]))
    return values, tokens.view(len(values), -1).gather(1, order), order // tokens.shape[1]


def _advance(
    hypotheses: _Hypotheses,
    candidates: list[Tensor],
    beams: Tensor,
    prompt: int,
    limit: int,
    scores: Tensor,
    tokens: Tensor,
    origins: Tensor,
) -> None:
    """One step of one group of one prompt; fills scores, tokens and origins [n/G]. beams: [n/G, T]"""
    settings, size = hypotheses.settings, hypotheses.size
    if hypotheses.is_done:
        scores.zero_()
        tokens.fill_(settings.pad_token_id or 0)
        origins.zero_()
        return
    length = beams.shape[1] + 1 - prompt
    values, next_tokens, next_beams = (part.tolist() for part in candidates)
    filled = 0
    for place, (value, token, beam) in enumerate(zip(values, next_tokens, next_beams, strict=True)):
        if token in settings.eos_token_ids:
            if place < size:
                hypotheses.add(beams[beam], value / length**settings.length_penalty)
            continue
        scores[filled], tokens[filled], origins[filled] = value, token, beam
        filled += 1
        if filled == size:
            break
    hypotheses.check(max(values), length, limit - prompt)


def _finalize(
    hypotheses: list[list[_Hypotheses]],
    beams: Tensor,
    scores: Tensor,
    prompt: int,
    limit: int,
    settings: GenerationSettings,
) -> tuple[Tensor, Tensor]:
    found: list[tuple[float, Tensor]] = []
    for row, groups in enumerate(hypotheses):
        for group, one in enumerate(groups):
            if not one.is_done:
                for sequence, score in zip(beams[row, group], scores[row, group].tolist(), strict=True):
                    one.add(sequence, score / max(beams.shape[-1] - prompt, 1) ** settings.length_penalty)
        together = sorted((one for group in groups for one in group.kept), key=lambda one: one[0])
        found += together[::-1][: settings.num_return_sequences]
    longest = min(max(len(sequence) for _, sequence in found) + 1, limit)
    result = beams.new_full((len(found), longest), settings.pad_token_id or 0)
    for row, (_, sequence) in zip(result, found, strict=True):
        row[: len(sequence)] = sequence
        if len(sequence) < longest and settings.eos_token_ids:
            row[len(sequence)] = settings.eos_token_ids[0]
    return result, torch.tensor([score for score, _ in found], device=beams.device)
