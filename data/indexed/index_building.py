"""Builds sample and sentence indexes: the numpy reference, and the compiled builders where they are
built.

Both give equal results. The reference is the ground truth of csrc/data/index.cpp.
"""

from __future__ import annotations

import numpy as np

try:
    from .._index import sample_index as build_samples
    from .._index import sentence_index as build_sentences
except ImportError:  # csrc/data/index.cpp was not built
    is_compiled = False
else:
    is_compiled = True

TOO_MANY_SAMPLES = "a sample begins after the last document"
_MASK = (1 << 64) - 1


def reference_sample_index(lengths: np.ndarray, first: int, stride: int, count: int) -> np.ndarray:
    """Returns where samples begin in the concatenation of documents.

    Sample k begins at token `first + k * stride`. With a stride of S - 1 and first 0 this is
    Megatron-LM's sample index for sequences of S - 1 tokens and one extra token. `lengths` int64
    [documents] are in reading order.

    Returns:
        int64 [count, 2]: (document, offset in it) of each sample.
    """
    _check_samples(first, stride, count)
    positions = first + stride * np.arange(count, dtype=np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    if count and (len(ends) == 0 or positions[-1] >= ends[-1]):
        raise ValueError(TOO_MANY_SAMPLES)
    documents = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[documents] - lengths[documents])
    return np.stack([documents, offsets], axis=1).astype(np.int64)  # [count, 2]


def draw(seed: int, n: int) -> int:
    """Returns number `n` of a seed's splitmix64 stream (Steele, Lea, Flood:

    Fast splittable generators, 2014).
    """
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def reference_sentence_index(
    sizes: np.ndarray,
    marks: np.ndarray,
    max_length: int,
    short_probability: float,
    least_sentences: int,
    seed: int,
) -> np.ndarray:
    """Cuts documents into runs of consecutive sentences; each run is a sample.

    A run grows until it has its target number of tokens and `least_sentences`, unless too few
    sentences would be left for another run. The target is `max_length`, or with `short_probability`
    uniform in 2..max_length (BERT's short sequences). Documents with fewer sentences are left out,
    as in Megatron-LM's build_mapping. `sizes` are the tokens of each sentence, `marks` [documents +
    1] the first sentence of each document and the end.

    Returns:
        int64 [samples, 3]: (first sentence, last sentence + 1, target number of tokens).
    """
    _check_sentences(sizes, marks, max_length)
    drawn = 0

    def next_target() -> int:
        nonlocal drawn
        u = (draw(seed, drawn) >> 11) * 2.0**-53
        drawn += 1
        if u >= short_probability:
            return max_length
        drawn += 1
        return 2 + draw(seed, drawn - 1) % (max_length - 1)

    rows: list[tuple[int, int, int]] = []
    for document in range(len(marks) - 1):
        first = int(marks[document])
        last = int(marks[document + 1])
        if last - first < least_sentences:
            continue
        tokens = 0
        target = next_target()
        for sentence in range(first, last):
            tokens += int(sizes[sentence])
            rest = last - sentence - 1
            full = (
                tokens >= target
                and sentence + 1 - first >= least_sentences
                and rest >= least_sentences
            )
            if full or rest == 0:
                if tokens > 0:
                    rows.append((first, sentence + 1, target))
                first = sentence + 1
                tokens = 0
                target = next_target()
    return np.array(rows, np.int64).reshape(-1, 3)


def _check_samples(first: int, stride: int, count: int) -> None:
    if first < 0 or stride < 1 or count < 0:
        raise ValueError("first and count must be at least 0, and stride at least 1")


def _check_sentences(sizes: np.ndarray, marks: np.ndarray, max_length: int) -> None:
    if max_length < 2:
        raise ValueError("max_length must be at least 2")
    if len(marks) == 0 or marks[0] < 0 or marks[-1] > len(sizes) or (marks[1:] < marks[:-1]).any():
        raise ValueError("document marks out of order")


def compiled_sample_index(lengths: np.ndarray, first: int, stride: int, count: int) -> np.ndarray:
    """Returns what `reference_sample_index` does. The module must be built."""
    return build_samples(_to_row(lengths, np.int64), first, stride, count)


def compiled_sentence_index(
    sizes: np.ndarray,
    marks: np.ndarray,
    max_length: int,
    short_probability: float,
    least_sentences: int,
    seed: int,
) -> np.ndarray:
    """Returns what `reference_sentence_index` does. The module must be built."""
    settings = (max_length, short_probability, least_sentences, seed)
    return build_sentences(_to_row(sizes, np.int32), _to_row(marks, np.int64), *settings)


def _to_row(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Returns the array itself if the compiled builders can read it, else a copy that they can."""
    return np.require(array, dtype, ("C", "A"))


sample_index = compiled_sample_index if is_compiled else reference_sample_index
sentence_index = compiled_sentence_index if is_compiled else reference_sentence_index
