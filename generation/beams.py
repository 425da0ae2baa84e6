"""Beam search, with transformers' scores, order of hypotheses and rules for stopping (release 5).

A step needs of each row only its best candidates, which the ranks exchange; sampled beams need whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mpu import ParallelMesh
from .decoders import Decoder
from .logits_processors import LogitsProcessors
from .settings import GenerationSettings
from .vocabulary import Draws, best, log_probabilities, whole_rows

NEVER = -1e9  # the score of what must not be chosen


def beam_search(
    decoder: Decoder, ids: Tensor, limit: int, settings: GenerationSettings, processors: LogitsProcessors
) -> tuple[Tensor, Tensor]:
    """The best sequences for each prompt, best first: ([B · num_return_sequences, T], their scores fp32).

    ids: int64 [B · n, T], each prompt n = num_beams times. Shorter sequences are filled with the padding token.
    """
    n, prompt = settings.num_beams, ids.shape[1]
    search = _Search(ids.unflatten(0, (-1, n)), limit, settings, decoder.model.mesh)
    while True:
        running = search.running.flatten(0, 1)[:, : search.length]
        scores, over = processors(running, log_probabilities(decoder(running), decoder.model.mesh))
        origins = search.step(*search.candidates(scores, over, decoder.model.config.vocab_size), processors)
        if not search.goes_on():
            break
        decoder.select(origins)
    kept = settings.num_return_sequences
    length = prompt + int(search.finished_lengths[:, :kept].max())
    return search.finished[:, :kept, :length].flatten(0, 1), search.finished_scores[:, :kept].flatten()


class _Search:
    """The running and the finished sequences of all prompts, each [B, n, limit] with scores [B, n]."""

    def __init__(self, ids: Tensor, limit: int, settings: GenerationSettings, mesh: ParallelMesh | None) -> None:
        self.settings, self.limit = settings, limit
        (rows, n, self.length), device = ids.shape, ids.device
        self.prompt = self.length
        self.keep = max(2, 1 + len(settings.eos_token_ids)) * n  # enough that n go on if all ends are among the best
        self.running = ids.new_full((rows, n, limit), settings.pad_token_id or 0)
        self.running[:, :, : self.length] = ids
        self.finished = self.running.clone()
        # All beams start equal: only the first counts at first.
        self.running_scores = torch.full((rows, n), NEVER, device=device)
        self.running_scores[:, 0] = 0
        self.finished_scores = torch.full((rows, n), NEVER, device=device)
        self.finished_lengths = ids.new_zeros(rows, n)
        self.is_finished = torch.zeros(rows, n, dtype=torch.bool, device=device)
        self.may_improve = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self.ends = torch.zeros(rows, self.keep, dtype=torch.bool, device=device)
        self.draws = Draws(settings.seed, mesh, device) if settings.do_sample else None

    def candidates(self, scores: Tensor, mesh: ParallelMesh | None, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `keep` best continuations of each prompt, or as many drawn ones: their scores, tokens and beams [B, K].

        scores: [B · n, Vp] of the next tokens.
        """
        n = self.settings.num_beams
        if self.draws is not None:
            total = whole_rows(scores, vocab_size, mesh).unflatten(0, (-1, n)) + self.running_scores[..., None]
            chances = total.flatten(1).softmax(-1).cpu()
            chosen = chances.multinomial(self.keep, generator=self.draws.generator).to(scores.device)  # [B, K]
            return total.flatten(1).gather(1, chosen), chosen % vocab_size, chosen // vocab_size
        values, tokens = best(scores, self.keep, mesh)  # [B · n, k]
        values = (values.unflatten(0, (-1, n)) + self.running_scores[..., None]).flatten(1)  # [B, n · k]
        values, order = values.topk(min(self.keep, values.shape[1]))
        return values, tokens.view(len(values), -1).gather(1, order), order // tokens.shape[1]

    def step(self, values: Tensor, tokens: Tensor, beams: Tensor, processors: LogitsProcessors) -> Tensor:
        """Goes on with the best candidates that do not end here, keeps those that do; returns of which rows
        [B · n] the running sequences are continuations."""
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
        n, settings = self.settings.num_beams, self.settings
        ends = self.ends.clone()
        ends[:, n:] = False  # worse candidates are only there so that n go on
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

    def goes_on(self) -> bool:
        """Whether a running sequence may still become better than a finished one."""
        settings = self.settings
        latest = self.limit if settings.early_stopping == "never" and settings.length_penalty > 0 else self.length
        possible = self.running_scores[:, :1] / (latest - self.prompt) ** settings.length_penalty
        worst = self.finished_scores.amin(1, keepdim=True).where(self.is_finished, NEVER)
        self.may_improve &= (possible > worst).any(-1, keepdim=True)
        all_full = self.is_finished.all() & (settings.early_stopping is True)
        return bool(self.may_improve.any() & ~all_full & ~self.ends.all())


def _take(sequences: Tensor, beams: Tensor) -> Tensor:
    """[B, n, T] by int64 [B, k] -> [B, k, T]"""
    return sequences.gather(1, beams[..., None].expand(-1, -1, sequences.shape[2]))
