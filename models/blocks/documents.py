"""Lets the tokens of packed rows attend within their document only, without a mask of all scores.

A document is computed like a row of its own, by the same attention operators: documents of similar
length form a batch, padded to the longest of them. So neither time nor memory is spent on scores
between documents, on any device, and causal rules, windows, relative biases and padding mean within
a document what they mean within a row.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class DocumentBatch(NamedTuple):
    """Documents, or parts of them, that attention computes together.

    Attributes:
        queries, keys: The places of their tokens among all tokens of the call [B·Sq] and [B·Sk],
            int64 [n, Lq] and [n, Lk]. Shorter documents repeat their first token.
        kept: The numbers of the queries in [n·Lq] that are no repetitions, int64 [t].
        places: The places of these queries among all tokens, int64 [t].
        samples: The sample of each document, int64 [n].
        first_queries: Where each document's first query is in its sample, int64 [n].
        mask: bool [n, 1, 1 or Lq, Lk], which keys are attended to; or int64 [n], with causal
            attention, the length of each document's prefix; None for all.
        offset: The queries begin at this token of their document.
    """

    queries: Tensor
    keys: Tensor
    kept: Tensor
    places: Tensor
    samples: Tensor
    first_queries: Tensor
    mask: Tensor | None
    offset: int


class _Piece(NamedTuple):
    """Queries of a document, and the keys that they may attend to, as places in their samples."""

    sample: int
    first_query: int
    queries_end: int
    first_key: int
    keys_end: int


class DocumentPlan(NamedTuple):
    """The batches in which the documents of a call are computed.

    Attributes:
        batches: Together they have each query once.
        places: The place of each kept query of all batches, one after the other, int64 [t].
        order: Where the query of each place is among the kept ones, int64 [t].
    """

    batches: list[DocumentBatch]
    places: Tensor
    order: Tensor


class DocumentStarts(NamedTuple):
    """Says where documents begin among the tokens of whole samples, one sample after the other.

    Attributes:
        starts: The first token of each of n documents, and the end of the last one, int64 [n + 1].
        samples, firsts: The sample of each document, and its first token within it, int64 [n].
        longest: The number of tokens of the longest document.
    """

    starts: Tensor
    samples: Tensor
    firsts: Tensor
    longest: int


class Documents:
    """Stands for the mask of packed rows, in which tokens attend within their document only.

    Args:
        numbers: The number of each token's document, [B or 1, S].
        keys: bool [B, 1, 1, S], False for padding; or None.
        causal: Whether tokens attend to themselves and to earlier ones only.
        reach: Tokens attend to those fewer than so many positions away; None for all.
        prefixes: int64 [B or 1, S], the length of the prefix of each token's document, whose tokens
            all others of it attend to. With `causal`, and neither `keys` nor `reach`.
    """

    def __init__(
        self,
        numbers: Tensor,
        keys: Tensor | None,
        *,
        causal: bool,
        reach: int | None = None,
        prefixes: Tensor | None = None,
    ) -> None:
        self.numbers = numbers
        self.keys = keys
        self.causal = causal
        self.reach = reach
        self.prefixes = prefixes
        self._spans: dict[int, list[tuple[int, int, int]] | None] = {}
        self._plans: dict[tuple[int, int, int, bool], DocumentPlan | None] = {}
        self._shared: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}
        self._starts: dict[int, DocumentStarts | None] = {}

    def to_tensor(self) -> Tensor:
        """Returns the complete mask, bool [B or 1, 1, S, S]."""
        allowed = self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        places = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        distance = places[:, None] - places
        if self.prefixes is not None:
            begins = F.pad(self.numbers.diff(dim=1) != 0, (1, 0), value=True)
            firsts = torch.where(begins, places, 0).cummax(1).values
            is_in_prefix = places - firsts < self.prefixes
            allowed = allowed & ((distance >= 0) | is_in_prefix[:, None, None, :])
        elif self.causal:
            allowed = allowed & (distance >= 0)
        if self.reach is not None:
            allowed = allowed & (distance.abs() < self.reach)
        return allowed if self.keys is None else allowed & self.keys

    def find_spans(self, batch: int) -> list[tuple[int, int, int]] | None:
        """Returns the sample, the first token and the end of each document.

        The host waits for them, once in a call of the model. The result is None if they are not
        known, on the meta device, or if the tokens of a document are not neighbors.
        """
        if batch in self._spans:
            return self._spans[batch]
        spans: list[tuple[int, int, int]] | None = None
        numbers = self.numbers.expand(batch, -1)
        changes = numbers.diff(dim=1)
        if not numbers.is_meta and not (changes < 0).any():
            spans = []
            length = numbers.shape[1]
            starts: list[list[int]] = [[0] for _ in range(batch)]
            found = cast(list[list[int]], changes.nonzero().tolist())
            for sample, place in found:
                starts[sample].append(place + 1)
            for sample, firsts in enumerate(starts):
                ends = [*firsts[1:], length]
                spans += [(sample, *span) for span in zip(firsts, ends, strict=True)]
        self._spans[batch] = spans
        return spans

    def find_starts(self, batch: int) -> DocumentStarts | None:
        """Returns where the documents begin; None if not all tokens of a document, or with `causal`
        all earlier ones, are visible, or if `find_spans` does not know them.
        """
        if batch not in self._starts:
            self._starts[batch] = self._make_starts(batch)
        return self._starts[batch]

    def _make_starts(self, batch: int) -> DocumentStarts | None:
        spans = self.find_spans(batch)
        if spans is None or self.keys is not None or self.prefixes is not None:
            return None
        longest = max(end - first for _, first, end in spans)
        if self.reach is not None and longest > self.reach:
            return None
        length = self.numbers.shape[1]
        table = torch.tensor([(*span[:2], 0) for span in spans] + [(batch, 0, 0)])
        table[:, 2] = table[:, 0] * length + table[:, 1]
        samples, firsts, starts = table.to(self.numbers.device).unbind(1)
        return DocumentStarts(starts.contiguous(), samples[:-1], firsts[:-1], longest)

    def find_shared(self, batch: int, share: int) -> tuple[tuple[int, int, int], ...]:
        """Returns the documents that lie on several ranks, each with `share` tokens of every sample;
        see `find_spans`.
        """
        name = (batch, share)
        if name not in self._shared:
            spans = self.find_spans(batch)
            assert spans is not None
            shared = [span for span in spans if span[1] // share != (span[2] - 1) // share]
            self._shared[name] = tuple(shared)
        return self._shared[name]

    def find_prefixes(self, spans: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """Returns the length of the prefix of each of these documents, int64 [n]; see `find_spans`."""
        if self.prefixes is None:
            return None
        table = torch.tensor(spans, dtype=torch.int64).reshape(-1, 3).to(self.numbers.device)
        samples, firsts, ends = table.unbind(1)
        rows = samples.clamp(max=len(self.prefixes) - 1)
        return self.prefixes[rows, firsts].long().minimum(ends - firsts)

    def plan(self, batch: int, first: int, end: int) -> DocumentPlan:
        """Returns how the queries [first, end) of each sample are computed with the keys of whole
        samples; see `find_spans`.

        Blocks of a model that share these documents share the plan.
        """
        plan = self._find_plan(batch, first, end, is_alone=False)
        assert plan is not None  # it has each query
        return plan

    def plan_alone(self, batch: int, first: int, end: int) -> DocumentPlan | None:
        """Returns how the documents are computed that lie in [first, end) whole, with the keys of
        these tokens; None if there are none.
        """
        return self._find_plan(batch, first, end, is_alone=True)

    def _find_plan(
        self, batch: int, first: int, end: int, *, is_alone: bool
    ) -> DocumentPlan | None:
        name = (batch, first, end, is_alone)
        if name not in self._plans:
            self._plans[name] = self._make_plan(*name)
        return self._plans[name]

    def _make_plan(self, batch: int, first: int, end: int, is_alone: bool) -> DocumentPlan | None:
        # Whole documents are batched by the number of bits of their lengths, so that less than half
        # of a batch is padding. A document of which only a part is asked for is alone.
        whole: dict[tuple[int, int], list[_Piece]] = {}
        parts: list[list[_Piece]] = []
        for span, (start, stop) in self._pair_spans(batch):
            sample = span[0]
            queries_start = max(span[1], first)
            queries_end = min(span[2], end)
            if queries_start >= queries_end:
                continue
            keys_end = queries_end if self._ends_with_queries else stop
            piece = _Piece(sample, queries_start, queries_end, start, keys_end)
            if (queries_start, queries_end) == span[1:]:
                bits = ((queries_end - queries_start).bit_length(), (keys_end - start).bit_length())
                whole.setdefault(bits, []).append(piece)
            elif not is_alone:
                parts.append([piece])
        keys = (first, end) if is_alone else (0, self.numbers.shape[1])
        batches = [
            self._make_batch(pieces, (first, end), keys) for pieces in [*whole.values(), *parts]
        ]
        if not batches:
            return None
        places = torch.cat([each.places for each in batches])
        return DocumentPlan(batches, places, places.argsort())

    @property
    def _ends_with_queries(self) -> bool:
        """Whether the last query of a document is at its last key, and nothing after it is seen."""
        return self.causal and self.prefixes is None

    def _pair_spans(self, batch: int) -> list[tuple[tuple[int, int, int], tuple[int, int]]]:
        """Returns the sample, the first query and the end of each document's queries; and its first
        key and the end of its keys.
        """
        spans = self.find_spans(batch)
        assert spans is not None
        return [(span, span[1:]) for span in spans]

    def _make_batch(
        self, pieces: list[_Piece], own_queries: tuple[int, int], own_keys: tuple[int, int]
    ) -> DocumentBatch:
        """Returns a batch of documents, or of a part of one.

        Args:
            own_queries, own_keys: The range of the queries, and of the keys, that the call has of
                each sample.
        """
        first, end = own_queries
        device = self.numbers.device
        length = self.numbers.shape[1]
        table = torch.tensor(pieces, dtype=torch.int64).to(device)  # [n, 5]
        samples, first_queries, queries_end, first_keys, keys_end = table.unbind(1)
        offset = pieces[0].first_query - pieces[0].first_key

        def number(firsts: Tensor, stops: Tensor, longest: int) -> tuple[Tensor, Tensor]:
            """Returns the positions [n, longest], and which of them are in the documents."""
            positions = firsts[:, None] + torch.arange(longest, device=device)
            inside = positions < stops[:, None]
            return torch.where(inside, positions, firsts[:, None]), inside

        query_counts = [piece.queries_end - piece.first_query for piece in pieces]
        key_counts = [piece.keys_end - piece.first_key for piece in pieces]
        longest_queries = max(query_counts)
        longest_keys = max(1, *key_counts)
        queries, are_queries = number(first_queries, queries_end, longest_queries)
        keys, are_keys = number(first_keys, keys_end, longest_keys)
        places = samples[:, None] * length + keys
        queries = samples[:, None] * (end - first) + queries - first
        keys = samples[:, None] * (own_keys[1] - own_keys[0]) + keys - own_keys[0]

        mask: Tensor | None = None
        if any(count != longest_keys for count in key_counts):
            mask = are_keys[:, None, None]
        if self.keys is not None:
            every = self.keys.expand(-1, 1, 1, length).reshape(-1, length)
            own = every.expand(max(len(every), int(samples.max()) + 1), -1).reshape(-1)[places]
            mask = (own & are_keys)[:, None, None]
        if self.reach is not None and longest_keys > self.reach:
            rows = torch.arange(longest_queries, device=device) + offset
            distance = rows[:, None] - torch.arange(longest_keys, device=device)
            near = distance.abs() < self.reach
            if self.causal:
                near = near & (distance >= 0)
            mask = near[None, None] if mask is None else near & mask
        prefixes = self.find_prefixes(
            [(piece.sample, piece.first_key, piece.keys_end) for piece in pieces]
        )
        if prefixes is not None and longest_queries == longest_keys:
            mask = prefixes  # a repetition of a shorter document comes after all of its keys
        elif prefixes is not None:
            # The queries are not the last ones, as the prefix rule wants: the rules become a mask.
            rows = torch.arange(longest_queries, device=device) + offset
            columns = torch.arange(longest_keys, device=device)
            mask = (columns <= rows[:, None]) | (columns < prefixes.view(-1, 1, 1, 1))
        kept = are_queries.flatten().nonzero()[:, 0]
        return DocumentBatch(
            queries, keys, kept, queries.flatten()[kept], samples, first_queries, mask, offset
        )


class CrossDocuments(Documents):
    """Stands for the mask of cross-attention between packed rows: tokens of a document of the queries
    attend to the document of the same number among the keys, and to nothing if there is none.

    Args:
        queries: The number of each query's document, [B or 1, Sq].
        numbers, keys: As in `Documents`, of the keys.
    """

    def __init__(self, queries: Tensor, numbers: Tensor, keys: Tensor | None) -> None:
        super().__init__(numbers, keys, causal=False)
        self.queries = Documents(queries, None, causal=False)

    def to_tensor(self) -> Tensor:
        """Returns the complete mask, bool [B or 1, 1, Sq, Sk]."""
        allowed = self.queries.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        return allowed if self.keys is None else allowed & self.keys

    def find_spans(self, batch: int) -> list[tuple[int, int, int]] | None:
        """Returns the sample, the first key and the end of each document of the keys, as the base."""
        return super().find_spans(batch) if self.queries.find_spans(batch) is not None else None

    def _make_starts(self, batch: int) -> DocumentStarts | None:
        return None  # a document has other queries than keys

    def _pair_spans(self, batch: int) -> list[tuple[tuple[int, int, int], tuple[int, int]]]:
        spans = self.find_spans(batch)
        query_spans = self.queries.find_spans(batch)
        assert spans is not None
        assert query_spans is not None
        numbers = cast(list[list[int]], self.numbers.expand(batch, -1).tolist())
        query_numbers = cast(list[list[int]], self.queries.numbers.expand(batch, -1).tolist())
        found = {(row, numbers[row][start]): (start, end) for row, start, end in spans}
        nothing = (0, 0)
        return [
            ((row, start, end), found.get((row, query_numbers[row][start]), nothing))
            for row, start, end in query_spans
        ]
