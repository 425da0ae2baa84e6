"""Implements the decoding strategies: greedy, sampling, beam search and diverse beam search.

Beam search has the scores, the order of hypotheses and the stopping rules of transformers 5.
Diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424) keeps groups of beams that avoid
each other's tokens. transformers removed it in release 4.57; scores, order and stopping rules here
are those of the last releases that had it.

In a step the ranks exchange only the best candidates of each row; sampled beams need complete rows.

Shapes have the letters B prompts, n beams of a prompt, R = B · n rows, G groups, T tokens so far,
K candidates of a prompt, and Vp columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...mpu import ParallelMesh, tp_rank
from .decoders import Decoder
from .outputs import Decoded
from .settings import GenerationSettings
from .vocabulary import (
    UniformNumbers,
    choose_most_likely,
    draw_tokens,
    find_best,
    gather_rows,
    log_probabilities,
)

if TYPE_CHECKING:
    from .logits_processors import LogitsProcessors

NEVER = -1e9
"""The score of candidates that must not be chosen."""


def decode(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
    streamer: Any = None,
) -> Decoded:
    """Decodes prompts int64 [R, T] to at most [R, limit], greedily or by sampling.

    Sequences that have ended are filled with the padding token. On the first rank of a replica, the
    streamer receives the prompt and each step's tokens.
    """
    mesh = decoder.model.mesh
    vocab_size = decoder.model.config.vocab_size
    record = decoder.record
    rows, length = ids.shape
    padding = settings.pad_token_id or 0
    sequences = ids.new_full((rows, limit), padding)
    sequences[:, :length] = ids
    if mesh is not None and mesh.get_model_parallel_rank() > 0:
        streamer = None
    draws = None
    if settings.do_sample:
        draws = UniformNumbers(settings.seed, mesh, ids.device)
    if streamer is not None:
        streamer.put(ids.cpu())
    running = ids.new_ones(rows).bool()
    while length < limit and running.any():
        so_far = sequences[:, :length]
        logits = decoder(so_far)
        if record is not None:
            record.add_logits(logits, vocab_size, mesh)
        scores, split_over = processors(so_far, logits)
        if record is not None:
            record.add_scores(scores, vocab_size, split_over)
        if draws is None:
            tokens = choose_most_likely(scores, split_over)
        else:
            tokens = draw_tokens(scores, draws.next(rows), split_over)
        if settings.eos_token_ids:
            tokens = tokens.where(running, padding)
        sequences[:, length] = tokens
        length += 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        seen = None if record is None else record.scores_so_far
        running &= ~processors.stops(sequences[:, :length], seen)
    if streamer is not None:
        streamer.end()
    return Decoded(sequences[:, :length])


def beam_search(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
) -> Decoded:
    """Decodes by beam search.

    Args:
        ids: int64 [B · n, T], each prompt n = num_beams times.

    Returns:
        The best sequences for each prompt, best first: int64 [B · num_return_sequences, T], filled
        with the padding token; their scores, fp32 [B · num_return_sequences]; and the beams that
        they followed.
    """
    mesh = decoder.model.mesh
    record = decoder.record
    vocab_size = decoder.model.config.vocab_size
    prompt = ids.shape[1]
    search = _BeamSearch(torch.unflatten(ids, 0, (-1, settings.num_beams)), limit, settings, mesh)
    while True:
        running = search.running.flatten(0, 1)[:, : search.length]
        logits = decoder(running)
        if record is not None:
            record.add_logits(logits, vocab_size, mesh)
        scores, split_over = processors(running, log_probabilities(logits, mesh))
        if record is not None:
            record.add_scores(scores, vocab_size, split_over)
            search.scores_so_far = record.scores_so_far
        candidates = search.find_candidates(scores, split_over, vocab_size)
        origins = search.step(*candidates, processors)
        if not search.may_continue():
            break
        decoder.select(origins)
    kept = settings.num_return_sequences
    new_tokens = int(search.finished_lengths[:, :kept].max())
    sequences = search.finished[:, :kept, : prompt + new_tokens].flatten(0, 1)
    followed = search.finished_rows[:, :kept, :new_tokens].flatten(0, 1)
    return Decoded(sequences, search.finished_scores[:, :kept].flatten(), followed)


class _BeamSearch:
    """Holds the running and the finished sequences of all prompts, each [B, n, limit] with scores
    [B, n].
    """

    def __init__(
        self, ids: Tensor, limit: int, settings: GenerationSettings, mesh: ParallelMesh | None
    ) -> None:
        rows, beams, length = ids.shape
        device = ids.device
        self.settings = settings
        self.limit = limit
        self.length = length
        self.prompt = length
        # So many candidates leave n that continue even if all end tokens are among the best.
        self.keep = max(2, 1 + len(settings.eos_token_ids)) * beams
        self.running = ids.new_full((rows, beams, limit), settings.pad_token_id or 0)
        self.running[:, :, :length] = ids
        self.finished = self.running.clone()
        # The row of R that each new token continues, -1 for tokens that are not there.
        self.running_rows = ids.new_full((rows, beams, limit - length), -1, dtype=torch.int32)
        self.finished_rows = self.running_rows.clone()
        self.scores_so_far: tuple[Tensor, ...] | None = None
        # All beams of a prompt start equal, so only the first may be continued in the first step.
        self.running_scores = torch.full((rows, beams), NEVER, device=device)
        self.running_scores[:, 0] = 0
        self.finished_scores: Tensor = torch.full((rows, beams), NEVER, device=device)
        self.finished_lengths = ids.new_zeros(rows, beams)
        self.is_finished = torch.zeros(rows, beams, dtype=torch.bool, device=device)
        self.may_improve: Tensor = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self.ends = torch.zeros(rows, self.keep, dtype=torch.bool, device=device)
        self.draws: UniformNumbers | None = None
        if settings.do_sample:
            self.draws = UniformNumbers(settings.seed, mesh, device)

    def find_candidates(
        self, scores: Tensor, mesh: ParallelMesh | None, vocab_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scores, tokens and beams [B, K] of the `keep` best, or sampled, continuations of
        each prompt.

        `scores` [B · n, Vp] of the next tokens are split over `mesh`.
        """
        if self.draws is None:
            return _find_best_continuations(scores, self.running_scores, self.keep, mesh)
        whole = gather_rows(scores, vocab_size, mesh)
        whole = torch.unflatten(whole, 0, (-1, self.settings.num_beams))  # [B, n, V]
        total = (whole + self.running_scores[..., None]).flatten(1)  # [B, n · V]
        chances = total.softmax(-1).cpu()
        chosen = chances.multinomial(self.keep, generator=self.draws.generator)  # [B, K]
        chosen = chosen.to(scores.device)
        return total.gather(1, chosen), chosen % vocab_size, chosen // vocab_size

    def step(
        self, values: Tensor, tokens: Tensor, beams: Tensor, processors: LogitsProcessors
    ) -> Tensor:
        """Continues with the best candidates that do not end with this token, and keeps the
        finished ones.

        Returns int64 [B · n], the row that each running sequence continues.
        """
        first_row = torch.arange(len(beams), device=beams.device)[:, None] * self.settings.num_beams
        sequences = _select_beams(self.running, beams)  # [B, K, limit]
        sequences[:, :, self.length] = tokens
        rows = _select_beams(self.running_rows, beams)  # [B, K, limit - prompt]
        rows[:, :, self.length - self.prompt] = beams + first_row
        self.length += 1
        ends = processors.stops(sequences.flatten(0, 1)[:, : self.length], self.scores_so_far)
        self.ends = ends.view(tokens.shape)
        going = values + self.ends * NEVER
        chosen = going.topk(self.settings.num_beams).indices  # [B, n]
        self.running = _select_beams(sequences, chosen)
        self.running_rows = _select_beams(rows, chosen)
        self.running_scores = going.gather(1, chosen)
        self._finish(sequences, rows, values)
        return (beams.gather(1, chosen) + first_row).flatten()

    def _finish(self, sequences: Tensor, rows: Tensor, values: Tensor) -> None:
        """Keeps the best n of the finished sequences and of the candidates that end.

        Args:
            sequences: int64 [B, K, limit], all candidates.
            rows: int32 [B, K, limit - prompt], the rows that their new tokens continue.
            values: [B, K], their log-probabilities.
        """
        settings = self.settings
        beams = settings.num_beams
        ends = self.ends.clone()
        # The other candidates exist only so that n sequences continue.
        ends[:, beams:] = False
        is_full = self.is_finished.all(-1, keepdim=True) & (settings.early_stopping is True)
        new_tokens = self.length - self.prompt
        scores = values / new_tokens**settings.length_penalty
        scores = scores + (is_full | ~self.may_improve) * NEVER + ~ends * NEVER
        lengths = torch.full_like(self.ends, new_tokens, dtype=torch.int64)

        merged = torch.cat([self.finished_scores, scores], 1)
        chosen = merged.topk(beams).indices
        self.finished_scores = merged.gather(1, chosen)
        self.finished = _select_beams(torch.cat([self.finished, sequences], 1), chosen)
        self.finished_rows = _select_beams(torch.cat([self.finished_rows, rows], 1), chosen)
        self.finished_lengths = torch.cat([self.finished_lengths, lengths], 1).gather(1, chosen)
        self.is_finished = torch.cat([self.is_finished, ends], 1).gather(1, chosen)

    def may_continue(self) -> bool:
        """Returns whether a running sequence may still become better than a finished one."""
        settings = self.settings
        # A positive length penalty favors long sequences, so "never" compares with the longest.
        latest = self.length
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            latest = self.limit
        possible = self.running_scores[:, :1] / (latest - self.prompt) ** settings.length_penalty
        worst = self.finished_scores.amin(1, keepdim=True).where(self.is_finished, NEVER)
        self.may_improve &= (possible > worst).any(-1, keepdim=True)
        all_full = self.is_finished.all() & (settings.early_stopping is True)
        return bool(self.may_improve.any() & ~all_full & ~self.ends.all())


def _select_beams(sequences: Tensor, beams: Tensor) -> Tensor:
    """Selects beams int64 [B, k] of sequences [B, n, T]; returns [B, k, T]."""
    return sequences.gather(1, beams[..., None].expand(-1, -1, sequences.shape[2]))


def _find_best_continuations(
    scores: Tensor, running: Tensor, keep: int, mesh: ParallelMesh | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best continuations of the beams of each prompt, or of each group.

    Args:
        scores: [B · n, Vp], the log-probabilities of the next tokens, split over `mesh`.
        running: [B, n], the scores of the beams.
        keep: Number of continuations, K; fewer if the vocabulary is smaller.

    Returns:
        Their scores, tokens and beams, [B, K] each, best first.
    """
    beams = running.shape[1]
    values, tokens = find_best(scores, keep, mesh)  # [B · n, k]
    candidates = tokens.shape[1]
    values = (torch.unflatten(values, 0, (-1, beams)) + running[..., None]).flatten(1)  # [B, n · k]
    values, order = values.topk(min(keep, values.shape[1]))
    tokens = tokens.view(len(values), -1).gather(1, order)
    return values, tokens, order // candidates


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
        """Keeps a sequence, in place of the worst one if there is no room."""
        if len(self.kept) >= self.size:
            if score <= self.worst:
                return
            self.kept.remove(min(self.kept, key=lambda one: one[0]))
        self.kept.append((score, sequence))

    def update_done(self, best_running: float, length: int, longest: int) -> None:
        """Updates `is_done`.

        Args:
            best_running: The log-probability of the best running sequence.
            length: The current number of tokens after the prompt.
            longest: The maximum number of tokens after the prompt.
        """
        if len(self.kept) < self.size:
            return
        penalty = self.settings.length_penalty
        compared_length = length
        if self.settings.early_stopping == "never" and penalty > 0:
            compared_length = longest
        possible = best_running / compared_length**penalty
        self.is_done |= self.settings.early_stopping is True or self.worst >= possible


def group_beam_search(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
) -> Decoded:
    """Decodes by diverse beam search; arguments and results are those of `beam_search`."""
    mesh = decoder.model.mesh
    groups = settings.num_beam_groups
    size = settings.num_beams // groups
    prompt = ids.shape[1]
    batch = len(ids) // settings.num_beams
    hypotheses: list[list[_Hypotheses]] = []
    for _ in range(batch):
        hypotheses.append([_Hypotheses(size, settings) for _ in range(groups)])
    scores = torch.full((batch, groups, size), NEVER, device=ids.device)
    scores[:, :, 0] = 0
    beams = torch.unflatten(ids, 0, (batch, groups, size))  # [B, G, n/G, T]
    keep = max(2, 1 + len(settings.eos_token_ids)) * size
    while beams.shape[-1] < limit:
        logs = log_probabilities(decoder(beams.flatten(0, 2)), mesh)
        logs = torch.unflatten(logs, 0, (batch, groups, size))  # [B, G, n/G, Vp]
        tokens = ids.new_zeros(batch, groups, size)
        origins = ids.new_zeros(batch, groups, size)
        for group in range(groups):
            # Each group avoids what the groups before it have just chosen.
            chosen_before = tokens[:, :group].flatten(1)
            avoided = _subtract_chosen(logs[:, group], chosen_before, settings, mesh)
            processed, split_over = processors(beams[:, group].flatten(0, 1), avoided.flatten(0, 1))
            candidates = _find_best_continuations(processed, scores[:, group], keep, split_over)
            for row in range(batch):
                _advance(
                    hypotheses[row][group],
                    [part[row] for part in candidates],
                    beams[row, group],
                    prompt,
                    limit,
                    scores[row, group],
                    tokens[row, group],
                    origins[row, group],
                )
        beams = torch.cat(
            [beams.gather(2, origins[..., None].expand_as(beams)), tokens[..., None]], -1
        )
        all_done = all(one.is_done for row in hypotheses for one in row)
        if all_done or processors.stops(beams.flatten(0, 2)).all():
            break
        first = torch.arange(batch * groups, device=ids.device).view(batch, groups, 1) * size
        decoder.select((origins + first).flatten())
    return Decoded(*_finalize(hypotheses, beams, scores, prompt, limit, settings))


def _subtract_chosen(
    logs: Tensor, chosen: Tensor, settings: GenerationSettings, mesh: ParallelMesh | None
) -> Tensor:
    """Subtracts `diversity_penalty` from scores [B, n/G, Vp] for each time that the token is in
    `chosen` [B, k].
    """
    column = chosen - tp_rank(mesh) * logs.shape[-1]
    is_here = (column >= 0) & (column < logs.shape[-1])
    counts = logs.new_zeros(logs.shape[0], logs.shape[-1])
    counts.scatter_add_(1, column.where(is_here, 0), is_here.to(logs.dtype))
    return logs - settings.diversity_penalty * counts[:, None]


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
    """Advances one group of one prompt by a step.

    Args:
        candidates: Scores, tokens and beams of the best continuations, [K] each.
        beams: int64 [n/G, T].
        scores: [n/G], filled with the scores of the continued beams.
        tokens: [n/G], filled with their new tokens.
        origins: [n/G], filled with the beams that they continue.
    """
    settings = hypotheses.settings
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
            if place < hypotheses.size:
                hypotheses.add(beams[beam], value / length**settings.length_penalty)
            continue
        scores[filled] = value
        tokens[filled] = token
        origins[filled] = beam
        filled += 1
        if filled == hypotheses.size:
            break
    hypotheses.update_done(max(values), length, limit - prompt)


def _finalize(
    hypotheses: list[list[_Hypotheses]],
    beams: Tensor,
    scores: Tensor,
    prompt: int,
    limit: int,
    settings: GenerationSettings,
) -> tuple[Tensor, Tensor]:
    """Returns the best sequences of all groups and their scores, as `beam_search` does."""
    length = max(beams.shape[-1] - prompt, 1)
    found: list[tuple[float, Tensor]] = []
    for row, groups in enumerate(hypotheses):
        kept: list[tuple[float, Tensor]] = []
        for group, one in enumerate(groups):
            if not one.is_done:
                running = cast(Any, scores[row, group]).tolist()
                for sequence, score in zip(beams[row, group], running, strict=True):
                    one.add(sequence, score / length**settings.length_penalty)
            kept += one.kept
        kept.sort(key=lambda one: one[0])
        found += kept[::-1][: settings.num_return_sequences]
    longest = min(max(len(sequence) for _, sequence in found) + 1, limit)
    result = beams.new_full((len(found), longest), settings.pad_token_id or 0)
    for row, (_, sequence) in zip(result, found, strict=True):
        row[: len(sequence)] = sequence
        if len(sequence) < longest and settings.eos_token_ids:
            row[len(sequence)] = settings.eos_token_ids[0]
    return result, torch.tensor([score for score, _ in found], device=beams.device)
