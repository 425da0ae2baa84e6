"""Implements assisted decoding: several tokens are drafted, and one forward pass checks them all.

The drafts come from a smaller model (Leviathan et al. 2022, arXiv:2211.17192) or from the text
itself, where its last tokens occurred before (prompt lookup, Saxena 2023). They decide how many
forward passes the model needs, and never a token: greedy decoding gives the tokens of greedy
decoding, and sampling gives those that the same seed gives without drafts, because each place has a
random number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...mpu import ParallelMesh, gather_from_tp, tp_rank
from .assistance_settings import AssistanceSettings
from .decoders import Decoder
from .outputs import Decoded
from .settings import GenerationSettings
from .vocabulary import (
    UniformNumbers,
    choose_most_likely,
    draw_tokens,
    log_probabilities,
    take_from_first_rank,
)

if TYPE_CHECKING:
    from .logits_processors import LogitsProcessors

DEFAULT_NGRAM = 2
DEFAULT_DRAFT = 20
DEFAULT_THRESHOLD = 0.4


class Draws:
    """The random number of each new token of one sequence, the same on every rank."""

    def __init__(self, seed: int | None, mesh: ParallelMesh | None, device: torch.device) -> None:
        self.numbers = UniformNumbers(seed, mesh, device)
        self.made: list[Tensor] = []

    def find(self, place: int) -> Tensor:
        """Returns the number of the new token at `place`, fp64 [1] in [0, 1)."""
        while len(self.made) <= place:
            self.made.append(self.numbers.next(1))
        return self.made[place]


class Drafts(Protocol):
    """What drafts tokens."""

    def draft(self, ids: Tensor, most: int, draws: Draws | None, place: int) -> Tensor:
        """Returns at most `most` tokens that may follow ids [1, T]: int64 [K], the same on every
        rank.

        Args:
            draws: The random numbers of sampling; None for greedy decoding.
            place: The number of new tokens so far.
        """
        ...

    def update(self, drafted: int, taken: int) -> None:
        """Notes how many tokens of the last draft the model has taken."""
        ...


class PromptLookup:
    """Drafts what followed the last tokens where they occurred first in the text.

    Args:
        encoder_ids: int64 [1, S], the text that an encoder has read, which is searched too.
        ends: The tokens that end a sequence.
    """

    def __init__(
        self, settings: AssistanceSettings, encoder_ids: Tensor | None, ends: Sequence[int]
    ) -> None:
        self.tokens = int(settings.prompt_lookup_num_tokens or 0)
        self.ngram = int(settings.max_matching_ngram_size or DEFAULT_NGRAM)
        self.encoder_ids = encoder_ids
        self.ends = torch.tensor(list(ends))

    def draft(self, ids: Tensor, most: int, draws: Draws | None, place: int) -> Tensor:
        text = ids[0]
        if self.encoder_ids is not None:
            text = torch.cat([self.encoder_ids[0], text])
        for size in range(min(self.ngram, ids.shape[1]), 0, -1):
            windows = text[:-1].unfold(0, size, 1)  # [T - size, size]
            starts = (windows == text[-size:]).all(1).nonzero()[:, 0] + size
            if len(starts):
                start = int(starts[0])
                found = text[start : start + min(self.tokens, most)]
                is_end = torch.isin(found, self.ends.to(found.device)).nonzero()
                return found[: int(is_end[0])] if len(is_end) else found
        return text[:0]

    def update(self, drafted: int, taken: int) -> None:
        pass


class Assistant:
    """Drafts with another model.

    Args:
        decoder: The assistant's, for the same prompt.
        processors: The assistant's, with the settings of the call.
        positions: The number of positions that the assistant has; None if it is unlimited.
        mesh: Over which the assisted model is split; the first rank's drafts count.
    """

    def __init__(
        self,
        decoder: Decoder,
        processors: LogitsProcessors,
        settings: AssistanceSettings,
        ends: Sequence[int],
        positions: int | None,
        mesh: ParallelMesh | None,
    ) -> None:
        self.decoder = decoder
        self.processors = processors
        self.ends = ends
        self.positions = positions
        self.mesh = mesh
        own = decoder.model.generation_config

        def choose(name: str, default: Any) -> Any:
            value = getattr(settings, name)
            if value is None:
                value = getattr(own, name, None)
            return default if value is None else value

        self.tokens = int(choose("num_assistant_tokens", DEFAULT_DRAFT))
        self.schedule: str = choose("num_assistant_tokens_schedule", "constant")
        self.threshold: float = choose("assistant_confidence_threshold", DEFAULT_THRESHOLD)

    def draft(self, ids: Tensor, most: int, draws: Draws | None, place: int) -> Tensor:
        length = ids.shape[1]
        most = min(self.tokens, most)
        if self.positions is not None:
            most = min(most, self.positions - length + 1)
        if most <= 0:
            return ids[0, :0]
        # The last token was the model's own, and what follows a rejected token is void.
        self.decoder.crop(length - 1)
        drafted = ids.new_full((1, length + most), -1)
        drafted[:, :length] = ids
        count = 0
        while count < most:
            so_far = drafted[:, : length + count]
            scores, split_over = self.processors(so_far, self.decoder(so_far))
            if draws is None:
                token = choose_most_likely(scores, split_over)
            else:
                token = draw_tokens(scores, draws.find(place + count), split_over)
            drafted[:, length + count] = token
            count += 1
            if int(token) in self.ends:
                break
            if self.threshold and _find_probability(scores, token, split_over) < self.threshold:
                break
        found = take_from_first_rank(drafted[0, length:], self.mesh)
        return found[found >= 0]

    def update(self, drafted: int, taken: int) -> None:
        if self.schedule == "constant" or not drafted:
            return
        self.tokens = self.tokens + 2 if taken == drafted else max(1, self.tokens - 1)


def _find_probability(scores: Tensor, token: Tensor, mesh: ParallelMesh | None) -> float:
    """Returns the probability of a token [1] by scores [1, Vp], which are split over the mesh."""
    logs = log_probabilities(scores, mesh)
    column = token - tp_rank(mesh) * logs.shape[1]
    is_here = (column >= 0) & (column < logs.shape[1])
    own = logs.gather(1, column.where(is_here, 0)[:, None])
    own = own.masked_fill(~is_here[:, None], float("-inf"))
    return float(gather_from_tp(own, mesh).max().exp())


def decode_assisted(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
    drafts: Drafts,
    streamer: Any = None,
) -> Decoded:
    """Decodes one prompt int64 [1, T] to at most [1, limit], with the tokens of `decode`."""
    mesh = decoder.model.mesh
    record = decoder.record
    vocab_size = decoder.model.config.vocab_size
    prompt = ids.shape[1]
    length = prompt
    sequence = ids.new_full((1, limit), settings.pad_token_id or 0)
    sequence[:, :length] = ids
    if mesh is not None and mesh.get_model_parallel_rank() > 0:
        streamer = None
    draws = Draws(settings.seed, mesh, ids.device) if settings.do_sample else None
    if streamer is not None:
        streamer.put(ids.cpu())
    is_running = True
    while is_running and length < limit:
        # One token follows the last drafted one in any case.
        drafted = drafts.draft(sequence[:, :length], limit - length - 1, draws, length - prompt)
        count = len(drafted)
        sequence[:, length : length + count] = drafted
        logits = decoder.verify(sequence[:, : length + count], count)  # [K + 1, Vp]
        likely = None
        if draws is None and not processors.processors:
            likely = choose_most_likely(logits, mesh)

        # Take the drafted tokens up to the first that the model does not choose, and then its own.
        start = length
        for row in range(count + 1):
            so_far = sequence[:, :length]
            scores = logits[row : row + 1]
            if record is not None:
                record.add_logits(scores, vocab_size, mesh)
            scores, split_over = processors(so_far, scores)
            if record is not None:
                record.add_scores(scores, vocab_size, split_over)
            if likely is not None:
                token = likely[row : row + 1]
            elif draws is None:
                token = choose_most_likely(scores, split_over)
            else:
                token = draw_tokens(scores, draws.find(length - prompt), split_over)
            is_taken = row < count and bool(token == drafted[row])
            sequence[:, length] = token
            length += 1
            seen = None if record is None else record.scores_so_far
            is_running = not bool(processors.stops(sequence[:, :length], seen))
            if not is_running or not is_taken:
                break
        if record is not None:
            record.split_states(count, length - start)
        if streamer is not None:
            streamer.put(sequence[:, start:length].cpu())
        decoder.crop(length - 1)
        drafts.update(count, length - start - 1)
    if streamer is not None:
        streamer.end()
    return Decoded(sequence[:, :length])
