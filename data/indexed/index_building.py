"""Builds the indexes that say where samples begin in a corpus, and which sentences they hold.

Each index has two builders with equal results: a reference in numpy, and a compiled one, which is
used where csrc/data/index.cpp was built. The reference is its ground truth.
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
_MASK = (1 << 64) - 1  # of 64-bit arithmetic


# ---------------------------------------------------------------------------------------- samples


def reference_sample_index(lengths: np.ndarray, first: int, stride: int, count: int) -> np.ndarray:
    """Returns where samples begin in the concatenation of documents.

    With a stride of S - 1 and first 0 this is Megatron-LM's sample index for sequences of S - 1
    tokens and one extra token.

    Args:
        lengths: int64 [documents], the tokens of each document in reading order.
        first: The token at which sample 0 begins.
        stride: Tokens from the beginning of a sample to that of the next one.
        count: The number of samples.

    Returns:
        int64 [count, 2]: (document, offset in it) of each sample.

    Raises:
        ValueError: A sample begins after the last document, or an argument is out of its range.
    """
    if first < 0 or stride < 1 or count < 0:
        raise ValueError("first and count must be at least 0, and stride at least 1")
    positions = first + stride * np.arange(count, dtype=np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    if count and (len(ends) == 0 or positions[-1] >= ends[-1]):
        raise ValueError(TOO_MANY_SAMPLES)
    documents = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[documents] - lengths[documents])
    return np.stack([documents, offsets], axis=1).astype(np.int64)  # [count, 2]


def compiled_sample_index(lengths: np.ndarray, first: int, stride: int, count: int) -> np.ndarray:
    """Returns what `reference_sample_index` does. The module must be built."""
    return build_samples(_to_row(lengths, np.int64), first, stride, count)


# -------------------------------------------------------------------------------------- sentences


def draw(seed: int, n: int) -> int:
    """Returns number `n` of a seed's splitmix64 stream.

    After Steele, Lea and Flood: Fast splittable pseudorandom number generators, 2014.
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
    sentences would be left for another run. Documents with fewer sentences are left out, as in
    Megatron-LM's build_mapping.

    Args:
        sizes: int32 [sentences], the tokens of each sentence.
        marks: int64 [documents + 1], the first sentence of each document, and the end.
        max_length: The target number of tokens of most runs.
        short_probability: The share of runs with a target that is uniform in 2..max_length, as
            BERT's short sequences have.
        least_sentences: The sentences that a run has at least.
        seed: That of the targets.

    Returns:
        int64 [samples, 3]: (first sentence, last sentence + 1, target number of tokens).

    Raises:
        ValueError: The marks are not in order, or max_length is below 2.
    """
    if max_length < 2:
        raise ValueError("max_length must be at least 2")
    if len(marks) == 0 or marks[0] < 0 or marks[-1] > len(sizes) or (marks[1:] < marks[:-1]).any():
        raise ValueError("document marks out of order")
    drawn = 0  # numbers of the stream that were used

    def draw_target() -> int:
        nonlocal drawn
        uniform = (draw(seed, drawn) >> 11) * 2.0**-53  # in [0, 1)
        drawn += 1
        if uniform >= short_probability:
            return max_length
        target = 2 + draw(seed, drawn) % (max_length - 1)
        drawn += 1
        return target

    rows: list[tuple[int, int, int]] = []
    for document in range(len(marks) - 1):
        first = int(marks[document])
        last = int(marks[document + 1])
        if last - first < least_sentences:
            continue
        tokens = 0
        target = draw_target()
        for sentence in range(first, last):
            tokens += int(sizes[sentence])
            rest = last - sentence - 1
            has_enough = tokens >= target and sentence + 1 - first >= least_sentences
            leaves_enough = rest >= least_sentences
            if (has_enough and leaves_enough) or rest == 0:
                if tokens > 0:  # A run of empty sentences is no sample.
                    rows.append((first, sentence + 1, target))
                first = sentence + 1
                tokens = 0
                target = draw_target()
    return np.array(rows, np.int64).reshape(-1, 3)


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
