"""Mixes datasets in exact shares: reads `wiki:0.7 code:0.3`, and says which dataset each sample is
from.
"""

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

    Sources without any share are one source: None for no source (the Python standard library), the
    source itself, or a list. The number after the last colon is a share, unless a file or folder
    has the whole name.

    Raises:
        ValueError: Only some sources have a share, one is not positive, or a source is named twice.
    """
    parts = [_split_share(text) for text in sources]
    with_share = [
        text for text, (_, share) in zip(sources, parts, strict=True) if share is not None
    ]
    without_share = [name for name, share in parts if share is None]
    if not with_share:
        whole = sources[0] if len(sources) == 1 else list(sources) or None
        return [(whole, Fraction(1))]
    if without_share:
        raise ValueError(
            f"{with_share[0]} has a share and {without_share[0]} has none; "
            f"give each source one, such as {without_share[0]}:0.5"
        )
    mixture: Mixture = []
    seen: dict[Path, str] = {}
    for text, (name, _) in zip(sources, parts, strict=True):
        path = Path(name).resolve()
        if path in seen:
            raise ValueError(
                f"{seen[path]} and {text} are the same source; "
                "name it once, with the sum of the shares"
            )
        seen[path] = text
    for text, (name, share) in zip(sources, parts, strict=True):
        if share:
            mixture.append((name, as_share(share, text)))
    return mixture


def _split_share(text: str) -> tuple[str, str | None]:
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
    """Returns a share as an exact number; 0.7 is 7/10.

    Raises:
        ValueError: The share of `what` is not positive and finite.
    """
    try:
        if 0 < float(share) < math.inf:  # NaN fails both comparisons.
            return share if isinstance(share, Fraction) else Fraction(str(share))
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(
        f"the share of {what} is {share!s}; a share must be a positive number, such as 0.7 or 7"
    )


@dataclass(frozen=True)
class _MixtureNode:
    """Two parts of a mixture that take turns.

    Of their first N samples, round(share · N) are from the first.
    """

    first: _MixturePart
    second: _MixturePart
    share: Fraction

    def count_first(self, samples: int) -> int:
        """Returns how many of the first `samples` samples are from the first part."""
        numerator, denominator = self.share.as_integer_ratio()
        return (2 * numerator * samples + denominator) // (2 * denominator)


_MixturePart = int | _MixtureNode  # the number of a dataset, or two parts


class MixedSamples:
    """Endless samples of several datasets in exact shares, for `ResumableLoader`.

    Which dataset sample n is from, and which of its samples that is, is a function of n and the
    shares alone: nothing is stored, so a run resumes exactly with any number of ranks. Of any N
    samples in a row, a dataset has its share of N up to 4 samples (up to 1 if there are two
    datasets), and each dataset gives its samples in order.

    The two smallest parts are joined, again and again, into pairs whose samples take turns (a
    Huffman tree). Its depth is what bounds the sum of the roundings: at most
    ½ · (1 + 1 + ½ + ⅓ + ⅕ + ⅛ + …) < 1.7 for the first N.

    Args:
        datasets: The components.
        shares: How much of the samples each component has; they need not sum to 1.
    """

    def __init__(
        self, datasets: Sequence[PretrainingSamples], shares: Sequence[float | Fraction]
    ) -> None:
        if not datasets or len(datasets) != len(shares):
            raise ValueError(
                f"there are {len(datasets)} datasets and {len(shares)} shares; "
                "each dataset needs a share"
            )
        self.datasets = list(datasets)
        exact = [as_share(share, f"dataset {number}") for number, share in enumerate(shares)]
        self.shares = [share / sum(exact) for share in exact]
        self._root = _build_huffman_tree(self.shares)

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the number of the dataset that sample `index` is from, and its number there."""
        index = operator.index(index)  # The products below would overflow NumPy's integers.
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        part = self._root
        while isinstance(part, _MixtureNode):
            before = part.count_first(index)
            is_from_first = part.count_first(index + 1) > before
            if is_from_first:
                part = part.first
                index = before
            else:
                part = part.second
                index -= before
        return part, index

    def __getitem__(self, index: int) -> Any:
        dataset, number = self.locate(index)
        return self.datasets[dataset][number]

    def count_samples(self, samples: int) -> list[int]:
        """Returns how many of the first `samples` samples are from each dataset."""
        counts = [0] * len(self.datasets)
        waiting: list[tuple[_MixturePart, int]] = [(self._root, samples)]
        while waiting:
            part, number = waiting.pop()
            if isinstance(part, _MixtureNode):
                from_first = part.count_first(number)
                waiting.append((part.first, from_first))
                waiting.append((part.second, number - from_first))
            else:
                counts[part] = number
        return counts

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
        counts = self.count_samples(samples)
        return [
            count / dataset.samples_per_epoch
            for count, dataset in zip(counts, self.datasets, strict=True)
        ]


def _build_huffman_tree(shares: Sequence[Fraction]) -> _MixturePart:
    """Joins the two parts of the smallest shares until one is left."""
    numbers = count()  # They decide between equal shares, so that parts are never compared.
    heap: list[tuple[Fraction, int, _MixturePart]] = []
    for dataset, share in enumerate(shares):
        heap.append((share, next(numbers), dataset))
    heapq.heapify(heap)
    while len(heap) > 1:
        small, _, first = heapq.heappop(heap)
        large, _, second = heapq.heappop(heap)
        node = _MixtureNode(first, second, small / (small + large))
        heapq.heappush(heap, (small + large, next(numbers), node))
    return heap[0][2]
