"""Greedy decoding and sampling: one sequence for each row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..mpu import tp_rank
from .decoders import Decoder
from .logits_processors import LogitsProcessors
from .settings import GenerationSettings
from .vocabulary import Draws, drawn, most_likely


def decode(
    decoder: Decoder,
    ids: Tensor,
    limit: int,
    settings: GenerationSettings,
    processors: LogitsProcessors,
    streamer: Any = None,
) -> Tensor:
    """Continues int64 [R, T] to at most [R, limit]. A sequence that has ended is filled with the padding token.

    streamer: gets the prompt and each step's tokens, on the first tensor-parallel rank.
    """
    (rows, length), mesh = ids.shape, decoder.model.mesh
    sequences = ids.new_full((rows, limit), settings.pad_token_id or 0)
    sequences[:, :length] = ids
    streamer = streamer if tp_rank(mesh) == 0 else None
    draws = Draws(settings.seed, mesh, ids.device) if settings.do_sample else None
    if streamer is not None:
        streamer.put(ids.cpu())
    running = ids.new_ones(rows).bool()
    while length < limit and running.any():
        so_far = sequences[:, :length]
        scores, over = processors(so_far, decoder(so_far))
        tokens = most_likely(scores, over) if draws is None else drawn(scores, draws.next(rows), over)
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
