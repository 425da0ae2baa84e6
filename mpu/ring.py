"""Computes attention whose keys and values pass around the ring of context-parallel ranks.

Each rank has the queries, keys and values of S/C positions. In C steps it computes the attention of
its queries to the keys of one rank after another, while the keys of the next one arrive, and merges
the results (Ring Attention; Liu et al., 2023, arXiv:2310.01889). So no rank ever has the keys of more
than two ranks. In the backward pass the gradients of keys and values travel with them, once around
the ring.

Causal attention would be twice as long on the last rank as on the average. Therefore every sequence
has 2C chunks there, and rank r computes the chunks r and 2C - 1 - r (as in Llama 3's training; Dubey
et al., 2024, arXiv:2407.21783): `balance_chunks` moves queries, keys and values there, and
`restore_chunks` moves the result back. All other layers keep their neighboring positions.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.attention_parts import PartRules, attend_to_part, differentiate_part, merge_part
from ..ops.autograd import Function
from .collectives import Finish
from .mesh import ParallelMesh


class RingRules(NamedTuple):
    """What applies to the scores of whole sequences.

    Attributes:
        scale, causal, dropout, keys, first_head: As in `ops.attention`.
        prefix: int64 [B], with `causal`.
        mask: [B or 1, N or 1, Sq or 1, Sk], of all queries and keys.
        queries: Sq.
        is_balanced: Whether q, k and v are those of `balance_chunks`.
    """

    scale: float
    queries: int
    causal: bool = False
    prefix: Tensor | None = None
    mask: Tensor | None = None
    dropout: float = 0.0
    keys: Tensor | None = None
    first_head: int = 0
    is_balanced: bool = False

    def list_chunks(self, rank: int, ranks: int) -> list[int]:
        """Returns the numbers of the chunks that a rank has."""
        return [rank, 2 * ranks - 1 - rank] if self.is_balanced else [rank]

    def sees(self, query_chunk: int, key_chunk: int) -> bool:
        """Returns whether any query of a chunk may attend to a key of another one."""
        return not self.causal or self.prefix is not None or query_chunk >= key_chunk

    def find_diagonals(self, first_query: int, first_key: int, queries: int, keys: int) -> slice:
        """Returns where a part's diagonals are among those of all queries and keys."""
        start = self.queries - (first_query + queries) + first_key
        return slice(start, start + queries + keys - 1)

    def cut(
        self, bias: Tensor | None, chunks: tuple[int, int], queries: int, keys: int
    ) -> PartRules:
        """Returns the rules for a chunk of queries and a chunk of keys of these lengths."""
        first_query = chunks[0] * queries
        first_key = chunks[1] * keys
        causal = self.causal and chunks[0] == chunks[1]
        prefix: Tensor | None = None
        lengths: Tensor | None = None
        if self.prefix is not None and chunks[0] <= chunks[1]:
            own = (self.prefix - first_key).clamp(0, keys)
            # Keys after the queries are seen if they are in the prefix.
            if causal:
                prefix = own
            else:
                lengths = own
        mask = self.mask
        if mask is not None:
            mask = mask[..., first_key : first_key + keys]
            if mask.shape[-2] > 1:
                mask = mask[..., first_query : first_query + queries, :]
        if bias is not None:
            bias = bias[:, self.find_diagonals(first_query, first_key, queries, keys)]
        return PartRules(
            scale=self.scale,
            relative_bias=bias,
            mask=mask,
            prefix=prefix,
            key_lengths=lengths,
            causal=causal,
            dropout=self.dropout,
            keys=self.keys,
            first_head=self.first_head,
            first_row=first_query,
            first_key=first_key,
        )


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rules: RingRules, mesh: ParallelMesh
) -> Tensor:
    """Returns the attention [B, N, Sq/C, D] of this rank's queries to the keys of all ranks.

    Collective over the context axis.

    Args:
        q: [B, N, Sq/C, D].
        k, v: [B, K, Sk/C, D].
        bias: [N, Sq + Sk - 1], one number for each distance key - query; it gets a gradient.
    """
    return _Ring.apply(q, k, v, bias, rules, mesh.cp_group)


def balance_chunks(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Returns the chunks r and 2C - 1 - r of 2C along dimension 2, from neighboring ones."""
    return _MoveChunks.apply(x, mesh.cp_group, False)


def restore_chunks(x: Tensor, mesh: ParallelMesh) -> Tensor:
    """Reverses `balance_chunks`."""
    return _MoveChunks.apply(x, mesh.cp_group, True)


def start_shift(tensor: Tensor, group: dist.ProcessGroup) -> Finish:
    """Starts to send a tensor to the next rank of a group, and to receive that of the previous one."""
    ranks = dist.get_process_group_ranks(group)
    place = group.rank()
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    following = ranks[(place + 1) % len(ranks)]
    previous = ranks[place - 1]
    operations = [
        dist.P2POp(dist.isend, sent, following, group),
        dist.P2POp(dist.irecv, received, previous, group),
    ]
    works: list[Any] = cast(Any, dist).batch_isend_irecv(operations)

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return received

    return finish


def _move_chunks(x: Tensor, group: dist.ProcessGroup, restores: bool) -> Tensor:
    """Moves the two chunks along dimension 2 of each rank to where they belong."""
    ranks = group.size()
    place = group.rank()
    neighbors = [2 * place, 2 * place + 1]
    homes = [min(chunk, 2 * ranks - 1 - chunk) for chunk in neighbors]  # of the neighboring chunks
    mirrored = [place, 2 * ranks - 1 - place]
    sources = [chunk // 2 for chunk in mirrored]  # of the chunks that this rank computes
    pieces = torch.unflatten(x, 2, (2, -1)).movedim(2, 0)  # [2, B, N, L, D]
    targets = sources if restores else homes
    origins = homes if restores else sources
    # Pieces travel in the order of ranks; two for one rank stay in their order.
    if targets[0] > targets[1]:
        pieces = pieces.flip(0)
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    cast(Any, dist).all_to_all_single(
        received,
        pieces,
        [origins.count(rank) for rank in range(ranks)],
        [targets.count(rank) for rank in range(ranks)],
        group=group,
    )
    if origins[0] > origins[1]:
        received = received.flip(0)
    return received.movedim(0, 2).flatten(2, 3)


class _MoveChunks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, restores: bool) -> Tensor:
        ctx.group = group
        ctx.restores = restores
        return _move_chunks(x, group, restores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return _move_chunks(grads[0], ctx.group, not ctx.restores), None, None


class _Ring(Function):
    """Implements `ring_attention`. It keeps q, k, v, the output and lse of this rank's positions."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        rules: RingRules,
        group: dist.ProcessGroup,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        travelling = torch.stack([k, v])
        for step in range(group.size()):
            finish = None
            if step < group.size() - 1:
                finish = start_shift(travelling, group)
            for rows, columns, chunks in _iterate_parts(q, k, rules, group, step):
                own_q = q[:, :, rows]
                own_k, own_v = travelling[:, :, :, columns].unbind(0)
                part = rules.cut(bias, chunks, own_q.shape[2], own_k.shape[2])
                merge_part(
                    out[:, :, rows], lse[:, :, rows], *attend_to_part(own_q, own_k, own_v, part)
                )
            if finish is not None:
                travelling = finish()
        result = out.to(q.dtype)
        ctx.rules = rules
        ctx.group = group
        ctx.save_for_backward(q, k, v, bias, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, bias, out, lse = ctx.saved_tensors
        rules: RingRules = ctx.rules
        group: dist.ProcessGroup = ctx.group
        grad = grads[0].contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        travelling = torch.stack([k, v])
        grad_travelling = torch.zeros(travelling.shape, dtype=wide, device=q.device)
        grad_bias: Tensor | None = None
        if bias is not None:
            grad_bias = torch.zeros(bias.shape, dtype=wide, device=q.device)
        for step in range(group.size()):
            finish = None
            if step < group.size() - 1:
                finish = start_shift(travelling, group)
            for rows, columns, chunks in _iterate_parts(q, k, rules, group, step):
                own_q = q[:, :, rows]
                own_k, own_v = travelling[:, :, :, columns].unbind(0)
                part = rules.cut(bias, chunks, own_q.shape[2], own_k.shape[2])
                found = differentiate_part(
                    grad[:, :, rows], out[:, :, rows], lse[:, :, rows], own_q, own_k, own_v, part
                )
                grad_q[:, :, rows] += found[0]
                grad_travelling[0][:, :, columns] += found[1]
                grad_travelling[1][:, :, columns] += found[2]
                if grad_bias is not None and found[3] is not None:
                    sizes = (own_q.shape[2], own_k.shape[2])
                    first_query = chunks[0] * sizes[0]
                    first_key = chunks[1] * sizes[1]
                    diagonals = rules.find_diagonals(first_query, first_key, *sizes)
                    grad_bias[:, diagonals] += found[3]
            # The gradients go once around the ring, and end where their keys began.
            if finish is not None:
                travelling = finish()
            grad_travelling = start_shift(grad_travelling, group)()
        grad_k, grad_v = grad_travelling.to(k.dtype).unbind(0)
        if bias is not None and grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_bias, None, None


def _iterate_parts(
    q: Tensor, k: Tensor, rules: RingRules, group: dist.ProcessGroup, step: int
) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yields the pairs of chunks that are computed in a step: the places of queries and of keys, and
    the numbers of both chunks.
    """
    ranks = group.size()
    own = rules.list_chunks(group.rank(), ranks)
    others = rules.list_chunks((group.rank() - step) % ranks, ranks)
    queries = q.shape[2] // len(own)
    keys = k.shape[2] // len(own)
    for row, query_chunk in enumerate(own):
        for column, key_chunk in enumerate(others):
            if rules.sees(query_chunk, key_chunk):
                rows = slice(row * queries, (row + 1) * queries)
                columns = slice(column * keys, (column + 1) * keys)
                yield rows, columns, (query_chunk, key_chunk)
