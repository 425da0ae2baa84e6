"""Mixes datasets in exact shares: reads `wiki:0.7 code:0.3`, and says which dataset each sample is from."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

from ..indexed.format import idx_path
from ..objectives.objective import PretrainingSamples
from ..text.sources import Source

Mixture = list[tuple[Source, Fraction]]


def parse_mixture(sources: Sequence[str]) -> Mixture:
    """Returns the sources and their shares, which need not sum to 1.

    Sources without any share are one source: None for no source (the Python standard library), the source itself, or
    a list. The number after the last colon is a share, unless a file or folder has the whole name.

    Raises:
        ValueError: only some sources have a share, one is not positive, or a source is named twice.
    """
    parts = [_split(text) for text in sources]
    with_share = [
        text for text, (_, share) in zip(sources, parts, strict=True) if share is not None
    ]
    if not with_share:
        return [(sources[0] if len(sources) == 1 else list(sources) or None, Fraction(1))]
    without = [name for name, share in parts if share is None]
    if without:
        raise ValueError(
            f"{with_share[0]} has a share and {without[0]} has none; give each source one, such as {without[0]}:0.5"
        )
    seen: dict[Path, str] = {}
    for text, (name, _) in zip(sources, parts, strict=True):
        path = Path(name).resolve()
        if path in seen:
            raise ValueError(
                f"{seen[path]} and {text} are the same source; name it once, with the sum of the shares"
            )
        seen[path] = text
    return [
        (name, as_share(share, text))
        for text, (name, share) in zip(sources, parts, strict=True)
        if share
    ]


def _split(text: str) -> tuple[str, str | None]:
    """Returns the name and the share, as written, of a source."""
    name, _, share = text.rpartition(":")
    try:
        float(share)
    except ValueError:
        return text, None
    if not name or Path(text).exists() or idx_path(text).exists():
        return text, None
    return name, share


def as_share(share: str | float | Fraction, what: str) -> Fraction:
    """Returns a share as an exact number; 0.7 is 7/10. ValueError, naming `what`, unless it is positive and finite."""
    try:
        if 0 < float(share) < math.inf:  # neither is NaN
            return share if isinstance(share, Fraction) else Fraction(str(share))
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(
        f"the share of {what} is {share!s}; a share must be a positive number, such as 0.7 or 7"
    )


@dataclass(frozen=True)
class _Pair:
    """Two parts that take turns; of their first N samples, round(share · N) are from the first."""

    first: _Part
    second: _Part
    share: Fraction

    def of_first(self, samples: int) -> int:
        numerator, denominator = self.share.as_integer_ratio()
        return (2 * numerator * samples + denominator) // (2 * denominator)


_Part = int | _Pair  # the number of a dataset, or a pair


class MixedSamples:
    """Endless samples of several datasets in exact shares, for `ResumableLoader`.

    Which dataset sample n is from, and which of its samples that is, is a function of n and the shares alone: nothing
    is stored, so a run resumes exactly with any number of ranks. Of any N samples in a row, a dataset has its share of
    N up to 4 samples (up to 1 if there are two datasets), and each dataset gives its samples in order.

    The two smallest parts are joined, again and again, into pairs whose samples take turns (a Huffman tree). Its
    depth is what bounds the sum of the roundings: at most ½ · (1 + 1 + ½ + ⅓ + ⅕ + ⅛ + …) < 1.7 for the first N.

    Args:
        datasets: the components.
        shares: how much of the samples each component has; they need not sum to 1.
    """

    def __init__(
        self, datasets: Sequence[PretrainingSamples], shares: Sequence[float | Fraction]
    ) -> None:
        if not datasets or len(datasets) != len(shares):
            raise ValueError(
                f"there are {len(datasets)} datasets and {len(shares)} shares; each dataset needs a share"
            )
        self.datasets = list(datasets)
        exact = [as_share(share, f"dataset {number}") for number, share in enumerate(shares)]
        self.shares = [share / sum(exact) for share in exact]
        self._root = _huffman_tree(self.shares)

    def place(self, index: int) -> tuple[int, int]:
        """Returns the number of the dataset that sample `index` is from, and its number there."""
        index = operator.index(index)  # the products below would overflow NumPy's integers
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        part = self._root
        while isinstance(part, _Pair):
            before = part.of_first(index)
            taken = part.of_first(index + 1) > before
            part, index = (part.first, before) if taken else (part.second, index - before)
        return part, index

    def __getitem__(self, index: int) -> Any:
        dataset, number = self.place(index)
        return self.datasets[dataset][number]

    def counts(self, samples: int) -> list[int]:
        """Returns how many of the first `samples` samples are from each dataset."""
        found = [0] * len(self.datasets)
        waiting: list[tuple[_Part, int]] = [(self._root, samples)]
        while waiting:
            part, number = waiting.pop()
            if isinstance(part, _Pair):
                first = part.of_first(number)
                waiting += [(part.first, first), (part.second, number - first)]
            else:
                found[part] = number
        return found

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over each dataset."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all datasets."""
        return sum(dataset.tokens_per_epoch for dataset in self.datasets)

    def epochs(self, samples: int) -> list[float]:
        """Returns how often each dataset has been read after `samples` samples."""
        counts = self.counts(samples)
        return [
            count / dataset.samples_per_epoch
            for count, dataset in zip(counts, self.datasets, strict=True)
        ]


def _huffman_tree(shares: Sequence[Fraction]) -> _Part:
    order = count()  # decides between equal shares, so that parts are never compared
    heap: list[tuple[Fraction, int, _Part]] = [
        (share, next(order), number) for number, share in enumerate(shares)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, _, first = heapq.heappop(heap)
        large, _, second = heapq.heappop(heap)
        heapq.heappush(
            heap, (small + large, next(order), _Pair(first, second, small / (small + large)))
        )
    return heap[0][2]
