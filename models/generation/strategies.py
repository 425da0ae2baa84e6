"""Implements the decoding strategies: greedy, sampling, beam search and diverse beam search.

Beam search has the scores, the order of hypotheses and the stopping rules of transformers 5.
Diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424) keeps groups of beams that avoid
each other's tokens. transformers removed it in release 4.57; scores, order and stopping rules here
are those of the last releases that had it.

In a step the ranks exchange only the best candidates of each row; sampled beams need complete rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...mpu import ParallelMesh, tp_rank
from .decoders import Decoder
from .settings import GenerationSettings
from .vocabulary import Draws, best, drawn, log_probabilities, most_likely, whole_rows

if TYPE_CHECKING:
    from .logits_processors import LogitsProcessors


def decode(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
    streamer: Any = None,
) -> Tensor:
    """Decodes prompts int64 [R, T] to at most [R, limit], greedily or by sampling.

    Sequences that have ended are filled with the padding token. On the first rank of a replica, the
    streamer receives the prompt and each step's tokens.
    """
    (rows, length), mesh = ids.shape, decoder.model.mesh
    sequences = ids.new_full((rows, limit), settings.pad_token_id or 0)
    sequences[:, :length] = ids
    streamer = streamer if mesh is None or mesh.get_model_parallel_rank() == 0 else None
    draws = Draws(settings.seed, mesh, ids.device) if settings.do_sample else None
    if streamer is not None:
        streamer.put(ids.cpu())
    running = ids.new_ones(rows).bool()
    while length < limit and running.any():
        so_far = sequences[:, :length]
        scores, over = processors(so_far, decoder(so_far))
        tokens = (
            most_likely(scores, over) if draws is None else drawn(scores, draws.next(rows), over)
        )
        if settings.eos_token_ids:
            tokens = tokens.where(running, settings.pad_token_id or 0)
        sequences[:, length] = tokens
        length += 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        running &= ~processors.stops(sequences[:, :length])
    if streamer is not None:
        streamer.end()
    return sequences[:, :length]


NEVER = -1e9  # the score of candidates that must not be chosen


def beam_search(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
) -> tuple[Tensor, Tensor]:
    """Decodes by beam search.

    Args:
        ids: int64 [B · n, T], each prompt n = num_beams times.

    Returns:
        The best sequences for each prompt, best first: int64 [B · num_return_sequences, T], filled
        with the padding token, and their scores, fp32 [B · num_return_sequences].
    """
    n = settings.num_beams
    prompt = ids.shape[1]
    search = _Search(torch.unflatten(ids, 0, (-1, n)), limit, settings, decoder.model.mesh)
    while True:
        running = search.running.flatten(0, 1)[:, : search.length]
        scores, over = processors(running, log_probabilities(decoder(running), decoder.model.mesh))
        origins = search.step(
            *search.candidates(scores, over, decoder.model.config.vocab_size), processors
        )
        if not search.may_continue():
            break
        decoder.select(origins)
    kept = settings.num_return_sequences
    length = prompt + int(search.finished_lengths[:, :kept].max())
    return search.finished[:, :kept, :length].flatten(0, 1), search.finished_scores[
        :, :kept
    ].flatten()


class _Search:
    """The running and the finished sequences of all prompts, each [B, n, limit] with scores [B, n]."""

    def __init__(
        self, ids: Tensor, limit: int, settings: GenerationSettings, mesh: ParallelMesh | None
    ) -> None:
        self.settings = settings
        self.limit = limit
        (rows, n, self.length), device = ids.shape, ids.device
        self.prompt = self.length
        self.keep = (
            max(2, 1 + len(settings.eos_token_ids)) * n
        )  # leaves n that continue even if all ends are among the best
        self.running = ids.new_full((rows, n, limit), settings.pad_token_id or 0)
        self.running[:, :, : self.length] = ids
        self.finished = self.running.clone()
        # All beams of a prompt start equal, so only the first may be continued in the first step.
        self.running_scores = torch.full((rows, n), NEVER, device=device)
        self.running_scores[:, 0] = 0
        self.finished_scores: Tensor = torch.full((rows, n), NEVER, device=device)
        self.finished_lengths = ids.new_zeros(rows, n)
        self.is_finished = torch.zeros(rows, n, dtype=torch.bool, device=device)
        self.may_improve: Tensor = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self.ends = torch.zeros(rows, self.keep, dtype=torch.bool, device=device)
        self.draws = Draws(settings.seed, mesh, device) if settings.do_sample else None

    def candidates(
        self, scores: Tensor, mesh: ParallelMesh | None, vocab_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scores, tokens and beams [B, K] of the `keep` best, or sampled, continuations of
        each prompt.

        `scores` [B · n, Vp] of the next tokens are split over `mesh`.
        """
        n = self.settings.num_beams
        if self.draws is not None:
            total = (
                torch.unflatten(whole_rows(scores, vocab_size, mesh), 0, (-1, n))
                + self.running_scores[..., None]
            )
            chances = total.flatten(1).softmax(-1).cpu()
            chosen = chances.multinomial(self.keep, generator=self.draws.generator).to(
                scores.device
            )  # [B, K]
            return total.flatten(1).gather(1, chosen), chosen % vocab_size, chosen // vocab_size
        values, tokens = best(scores, self.keep, mesh)  # [B · n, k]
        values = (torch.unflatten(values, 0, (-1, n)) + self.running_scores[..., None]).flatten(
            1
        )  # [B, n · k]
        values, order = values.topk(min(self.keep, values.shape[1]))
        return values, tokens.view(len(values), -1).gather(1, order), order // tokens.shape[1]

    def step(
        self, values: Tensor, tokens: Tensor, beams: Tensor, processors: LogitsProcessors
    ) -> Tensor:
        """Continues with the best candidates that do not end with this token, and keeps the
        finished ones.

        Returns int64 [B · n], the row that each running sequence continues.
        """
        sequences = _take(self.running, beams)  # [B, K, limit]
        sequences[:, :, self.length] = tokens
        self.length += 1
        self.ends = processors.stops(sequences.flatten(0, 1)[:, : self.length]).view(tokens.shape)
        going = values + self.ends * NEVER
        chosen = going.topk(self.settings.num_beams).indices  # [B, n]
        self.running, self.running_scores = _take(sequences, chosen), going.gather(1, chosen)
        self._finish(sequences, values)
        first_row = torch.arange(len(beams), device=beams.device)[:, None] * self.settings.num_beams
        return (beams.gather(1, chosen) + first_row).flatten()

    def _finish(self, sequences: Tensor, values: Tensor) -> None:
        n = self.settings.num_beams
        settings = self.settings
        ends = self.ends.clone()
        ends[:, n:] = False  # the others exist only so that n sequences continue
        full = self.is_finished.all(-1, keepdim=True) & (settings.early_stopping is True)
        scores = values / (self.length - self.prompt) ** settings.length_penalty
        scores = scores + (full | ~self.may_improve) * NEVER + ~ends * NEVER
        lengths = torch.full_like(self.ends, self.length - self.prompt, dtype=torch.int64)
        merged = torch.cat([self.finished_scores, scores], 1)
        chosen = merged.topk(n).indices
        self.finished = _take(torch.cat([self.finished, sequences], 1), chosen)
        self.finished_scores = merged.gather(1, chosen)
        self.finished_lengths = torch.cat([self.finished_lengths, lengths], 1).gather(1, chosen)
        self.is_finished = torch.cat([self.is_finished, ends], 1).gather(1, chosen)

    def may_continue(self) -> bool:
        """Returns whether a running sequence may still become better than a finished one."""
        settings = self.settings
        latest = (
            self.limit
            if settings.early_stopping == "never" and settings.length_penalty > 0
            else self.length
        )
        possible = self.running_scores[:, :1] / (latest - self.prompt) ** settings.length_penalty
        worst = self.finished_scores.amin(1, keepdim=True).where(self.is_finished, NEVER)
        self.may_improve &= (possible > worst).any(-1, keepdim=True)
        all_full = self.is_finished.all() & (settings.early_stopping is True)
        return bool(self.may_improve.any() & ~all_full & ~self.ends.all())


def _take(sequences: Tensor, beams: Tensor) -> Tensor:
    """Selects beams int64 [B, k] of sequences [B, n, T]; returns [B, k, T]."""
    return sequences.gather(1, beams[..., None].expand(-1, -1, sequences.shape[2]))


@dataclass
class _Hypotheses:
    """The finished sequences of one group of one prompt, at most `size` of them."""

    size: int
    settings: GenerationSettings
    kept: list[tuple[float, Tensor]] = field(default_factory=list[tuple[float, Tensor]])
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
        """Updates `is_done`. `length` and `longest` are the current and the maximum length, without
        the prompt.
        """
        if len(self.kept) < self.size:
            return
        penalty = self.settings.length_penalty
        at = longest if self.settings.early_stopping == "never" and penalty > 0 else length
        self.is_done |= (
            self.settings.early_stopping is True or self.worst >= best_running / at**penalty
        )


def group_beam_search(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
) -> tuple[Tensor, Tensor]:
    """Decodes by diverse beam search; arguments and results are those of `beam_search`."""
    n = settings.num_beams
    groups = settings.num_beam_groups
    size = n // groups
    prompt = ids.shape[1]
    batch = len(ids) // n
    hypotheses = [[_Hypotheses(size, settings) for _ in range(groups)] for _ in range(batch)]
    scores = torch.full((batch, groups, size), NEVER, device=ids.device)
    scores[:, :, 0] = 0
    beams = torch.unflatten(ids, 0, (batch, groups, size))  # [B, G, n/G, T]
    while beams.shape[-1] < limit:
        flat = beams.flatten(0, 2)
        logs = log_probabilities(decoder(flat), decoder.model.mesh)
        logs = torch.unflatten(logs, 0, (batch, groups, size))
        tokens = ids.new_zeros(batch, groups, size)
        origins = ids.new_zeros(batch, groups, size)
        for group in range(groups):
            avoided = _subtract_chosen(
                logs[:, group], tokens[:, :group].flatten(1), settings, decoder.model.mesh
            )
            processed, over = processors(beams[:, group].flatten(0, 1), avoided.flatten(0, 1))
            step = _candidates(processed, scores[:, group], settings, over)
            for row in range(batch):
                _advance(hypotheses[row][group], [part[row] for part in step], beams[row, group], prompt, limit,
                         scores[row, group], tokens[row, group], origins[row, group])  # fmt: skip
        chosen = origins[..., None].expand_as(beams)
        beams = torch.cat([beams.gather(2, chosen), tokens[..., None]], -1)
        first = torch.arange(batch * groups, device=ids.device).view(batch, groups, 1) * size
        if (
            all(one.is_done for row in hypotheses for one in row)
            or processors.stops(beams.flatten(0, 2)).all()
        ):
            break
        decoder.select((origins + first).flatten())
    return _finalize(hypotheses, beams, scores, prompt, limit, settings)


def _subtract_chosen(
    logs: Tensor, chosen: Tensor, settings: GenerationSettings, mesh: ParallelMesh | None
) -> Tensor:
    """Subtracts `diversity_penalty` from scores [B, n/G, Vp] for each time that the token is in
    `chosen` [B, k].
    """
    column = chosen - tp_rank(mesh) * logs.shape[-1]
    here = (column >= 0) & (column < logs.shape[-1])
    counts = logs.new_zeros(logs.shape[0], logs.shape[-1])
    counts.scatter_add_(1, column.where(here, 0), here.to(logs.dtype))
    return logs - settings.diversity_penalty * counts[:, None]


def _candidates(
    processed: Tensor, running: Tensor, settings: GenerationSettings, mesh: ParallelMesh | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best continuations of a group: scores, tokens and beams, [B, k] each."""
    size = running.shape[1]
    keep = max(2, 1 + len(settings.eos_token_ids)) * size
    values, tokens = best(processed, keep, mesh)  # [B · n/G, k]
    values = (torch.unflatten(values, 0, (-1, size)) + running[..., None]).flatten(1)
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
    """Advances one group of one prompt, with beams [n/G, T], by a step; fills scores, tokens and
    origins [n/G].
    """
    settings = hypotheses.settings
    size = hypotheses.size
    if hypotheses.is_done:
        scores.zero_()
        tokens.fill_(settings.pad_token_id or 0)
        origins.zero_()
        return
    length = beams.shape[1] + 1 - prompt
    values, next_tokens, next_beams = (cast(Any, part).tolist() for part in candidates)
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
                for sequence, score in zip(
                    beams[row, group], cast(Any, scores[row, group]).tolist(), strict=True
                ):
                    one.add(
                        sequence,
                        score / max(beams.shape[-1] - prompt, 1) ** settings.length_penalty,
                    )
        together = sorted((one for group in groups for one in group.kept), key=lambda one: one[0])
        found += together[::-1][: settings.num_return_sequences]
    longest = min(max(len(sequence) for _, sequence in found) + 1, limit)
    result = beams.new_full((len(found), longest), settings.pad_token_id or 0)
    for row, (_, sequence) in zip(result, found, strict=True):
        row[: len(sequence)] = sequence
        if len(sequence) < longest and settings.eos_token_ids:
            row[len(sequence)] = settings.eos_token_ids[0]
    return result, torch.tensor([score for score, _ in found], device=beams.device)
