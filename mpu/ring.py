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

Where rows are packed documents, ranks compute what each document has on both of them, and keys and
values pass only as far as a document reaches.
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


class RingPart(NamedTuple):
    """Some queries of one rank and some keys of one rank, whose scores are computed together.

    Attributes:
        samples: Their samples.
        rows: The queries among those of their rank.
        columns: The keys among those of theirs.
        diagonals: Their distances among those of all queries and keys.
        rules: What applies to the scores.
    """

    samples: slice
    rows: slice
    columns: slice
    diagonals: slice
    rules: PartRules


class RingRules(NamedTuple):
    """What applies to the scores of whole sequences.

    Attributes:
        scale, causal, dropout, keys, first_head, softcap: As in `ops.attention`.
        prefix: int64 [B], with `causal`; of each document, if there are any.
        mask: [B or 1, N or 1, Sq or 1, Sk], of all queries and keys.
        queries: Sq.
        is_balanced: Whether q, k and v are those of `balance_chunks`.
        documents: The sample, the first token and the end of each document whose tokens attend to
            one another and to no others; queries that are in none get zeros. Dropout counts the
            keys from the document's first one. They need Sq = Sk, and neither a mask with a row for
            each query nor balanced chunks. None if each sequence is one document.
        reach: Tokens of a document attend to those fewer than so many positions away; None for all.
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
    documents: tuple[tuple[int, int, int], ...] | None = None
    reach: int | None = None
    softcap: float | None = None

    def count_steps(self, ranks: int) -> int:
        """Returns the number of steps in which each rank sees all keys that its queries attend to."""
        if self.documents is None:
            return ranks
        share = self.queries // ranks
        farthest = 0
        for _, start, end in self.documents:
            places = range(start // share, (end - 1) // share + 1)
            for rank in places:
                for source in places:
                    if self._meet((start, end), rank, source, share) is not None:
                        farthest = max(farthest, (rank - source) % ranks)
        return farthest + 1

    def iterate_parts(
        self, q: Tensor, k: Tensor, bias: Tensor | None, rank: int, source: int, ranks: int
    ) -> Iterator[RingPart]:
        """Yields the parts that a rank computes with the keys of the rank `source`.

        Args:
            q: [B, N, Sq/C, D].
            k: [B, K, Sk/C, D].
            bias: See `ring_attention`.
        """
        if self.documents is not None:
            yield from self._iterate_documents(q, bias, rank, source)
            return
        own = self._list_chunks(rank, ranks)
        others = self._list_chunks(source, ranks)
        queries = q.shape[2] // len(own)
        keys = k.shape[2] // len(own)
        for row, query_chunk in enumerate(own):
            for column, key_chunk in enumerate(others):
                if not self._sees(query_chunk, key_chunk):
                    continue
                first_query = query_chunk * queries
                first_key = key_chunk * keys
                diagonals = self._find_diagonals(first_query, first_key, queries, keys)
                rules = self._cut(first_query, first_key, queries, keys)
                if bias is not None:
                    rules = rules._replace(relative_bias=bias[:, diagonals])
                rows = slice(row * queries, (row + 1) * queries)
                columns = slice(column * keys, (column + 1) * keys)
                yield RingPart(slice(None), rows, columns, diagonals, rules)

    def _list_chunks(self, rank: int, ranks: int) -> list[int]:
        """Returns the numbers of the chunks that a rank has."""
        return [rank, 2 * ranks - 1 - rank] if self.is_balanced else [rank]

    def _sees(self, query_chunk: int, key_chunk: int) -> bool:
        """Returns whether any query of a chunk may attend to a key of another one."""
        return not self.causal or self.prefix is not None or query_chunk >= key_chunk

    def _find_diagonals(self, first_query: int, first_key: int, queries: int, keys: int) -> slice:
        """Returns where a part's diagonals are among those of all queries and keys."""
        start = self.queries - (first_query + queries) + first_key
        return slice(start, start + queries + keys - 1)

    def _cut(self, first_query: int, first_key: int, queries: int, keys: int) -> PartRules:
        """Returns the rules for a chunk of queries and a chunk of keys, without the bias."""
        causal = self.causal and first_query == first_key
        prefix, lengths = None, None
        if self.prefix is not None:
            own_prefix = self.prefix - first_key
            prefix, lengths = self._cut_prefix(own_prefix, keys, first_query - first_key)
        mask = self.mask
        if mask is not None:
            mask = mask[..., first_key : first_key + keys]
            if mask.shape[-2] > 1:
                mask = mask[..., first_query : first_query + queries, :]
        return PartRules(
            scale=self.scale,
            mask=mask,
            prefix=prefix,
            key_lengths=lengths,
            causal=causal,
            dropout=self.dropout,
            keys=self.keys,
            first_head=self.first_head,
            first_row=first_query,
            first_key=first_key,
            softcap=self.softcap,
        )

    def _cut_prefix(
        self, prefix: Tensor, keys: int, distance: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the rules `prefix` and `key_lengths` for a part of the keys.

        Args:
            prefix: The length of the prefix from the part's first key on.
            keys: Their number.
            distance: From that key to the first query; below 0 for keys after the queries, which
                are seen if they are in the prefix.
        """
        if distance > 0:
            return None, None
        own = prefix.clamp(0, keys)
        return (own, None) if distance == 0 else (None, own)

    def _meet(
        self, span: tuple[int, int], rank: int, source: int, share: int
    ) -> tuple[range, range] | None:
        """Returns the queries that a rank has of a document, and the keys that the rank `source` has
        of it, without those that are too far from all others; None if no query sees a key.

        Args:
            span: The first token and the end of the document.
            share: The number of tokens of each rank.
        """
        if self.causal and source > rank and self.prefix is None:
            return None
        start, end = span
        first_query = max(start, rank * share)
        queries_end = min(end, (rank + 1) * share)
        first_key = max(start, source * share)
        keys_end = min(end, (source + 1) * share)
        if self.reach is not None and source < rank:
            first_key = max(first_key, first_query - self.reach + 1)
            queries_end = min(queries_end, keys_end - 1 + self.reach)
        if self.reach is not None and source > rank:
            first_query = max(first_query, first_key - self.reach + 1)
            keys_end = min(keys_end, queries_end - 1 + self.reach)
        if first_query >= queries_end or first_key >= keys_end:
            return None
        return range(first_query, queries_end), range(first_key, keys_end)

    def _iterate_documents(
        self, q: Tensor, bias: Tensor | None, rank: int, source: int
    ) -> Iterator[RingPart]:
        """Yields the part of each document of which both ranks have tokens that see each other."""
        assert self.documents is not None
        share = q.shape[2]
        for number, (sample, start, end) in enumerate(self.documents):
            met = self._meet((start, end), rank, source, share)
            if met is None:
                continue
            queries, keys = met
            samples = slice(sample, sample + 1)
            diagonals = self._find_diagonals(queries[0], keys[0], len(queries), len(keys))
            mask: Tensor | None = None
            if self.mask is not None:
                mask = self.mask[samples if len(self.mask) > 1 else slice(None)]
                mask = mask[..., keys.start : keys.stop]
            farthest = max(queries[-1] - keys[0], keys[-1] - queries[0])
            if self.reach is not None and farthest >= self.reach:
                places = torch.arange(queries.start, queries.stop, device=q.device)
                distance = places[:, None] - torch.arange(keys.start, keys.stop, device=q.device)
                near = (distance.abs() < self.reach)[None, None]
                mask = near if mask is None else near & mask
            prefix, lengths = None, None
            if self.prefix is not None:
                own_prefix = self.prefix[number : number + 1] - (keys.start - start)
                prefix, lengths = self._cut_prefix(own_prefix, len(keys), rank - source)
            rules = PartRules(
                scale=self.scale,
                relative_bias=None if bias is None else bias[:, diagonals],
                mask=mask,
                prefix=prefix,
                key_lengths=lengths,
                causal=self.causal and rank == source,
                dropout=self.dropout,
                keys=None if self.keys is None else self.keys[samples],
                first_head=self.first_head,
                first_row=queries.start,
                first_key=keys.start - start,
                softcap=self.softcap,
            )
            rows = slice(queries.start - rank * share, queries.stop - rank * share)
            columns = slice(keys.start - source * share, keys.stop - source * share)
            yield RingPart(samples, rows, columns, diagonals, rules)


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


def start_shift(tensor: Tensor, group: dist.ProcessGroup, by: int = 1) -> Finish:
    """Starts to send a tensor to the rank `by` places further in a group, by default to the next
    one, and to receive that of the rank as many places before.
    """
    ranks = dist.get_process_group_ranks(group)
    place = group.rank()
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    following = ranks[(place + by) % len(ranks)]
    previous = ranks[(place - by) % len(ranks)]
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
        ranks = group.size()
        steps = rules.count_steps(ranks)
        for step in range(steps):
            finish = None
            if step < steps - 1:
                finish = start_shift(travelling, group)
            source = (group.rank() - step) % ranks
            for part in rules.iterate_parts(q, k, bias, group.rank(), source, ranks):
                rows = (part.samples, slice(None), part.rows)
                own_k, own_v = travelling[:, part.samples, :, part.columns].unbind(0)
                found = attend_to_part(q[rows], own_k, own_v, part.rules)
                merge_part(out[rows], lse[rows], *found)
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
        ranks = group.size()
        steps = rules.count_steps(ranks)
        for step in range(steps):
            finish = None
            if step < steps - 1:
                finish = start_shift(travelling, group)
            source = (group.rank() - step) % ranks
            for part in rules.iterate_parts(q, k, bias, group.rank(), source, ranks):
                rows = (part.samples, slice(None), part.rows)
                columns = (part.samples, slice(None), part.columns)
                own_k, own_v = travelling[:, part.samples, :, part.columns].unbind(0)
                found = differentiate_part(
                    grad[rows], out[rows], lse[rows], q[rows], own_k, own_v, part.rules
                )
                grad_q[rows] += found[0]
                grad_travelling[0][columns] += found[1]
                grad_travelling[1][columns] += found[2]
                if grad_bias is not None and found[3] is not None:
                    grad_bias[:, part.diagonals] += found[3]
            if finish is not None:
                travelling = finish()
                grad_travelling = start_shift(grad_travelling, group)()
        # The gradients have travelled with their keys. Now they go back to where these began.
        if steps > 1:
            grad_travelling = start_shift(grad_travelling, group, by=1 - steps)()
        grad_k, grad_v = grad_travelling.to(k.dtype).unbind(0)
        if bias is not None and grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_bias, None, None
