"""Makes samples of encoder-decoders from texts: span corruption and prefix language modeling.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer",
2020, sections 3.1.4 and 3.2; the segmentation is that of `random_spans_noise_mask` in the published
T5 code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..labels import IGNORED

Sample = dict[str, np.ndarray]


@dataclass(frozen=True)
class SpanCorruption:
    """Replaces random spans by sentinels; the target has the spans, each after its sentinel.

    `corruption(tokens [n], generator)` returns `input_ids` and `labels`, int64, both ending with
    one end-of-sequence token. Their lengths depend on n alone; see `lengths`.

    Args:
        sentinels: Ids of the sentinels, in order of use (see `sentinel_ids`).
        eos_token_id: The last token of input and target.
        noise_density: Share of tokens that is corrupted.
        mean_span_length: Corrupted tokens per span on average.
    """

    sentinels: tuple[int, ...]
    eos_token_id: int
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    _sentinel_array: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise ValueError(
                f"noise_density is {self.noise_density}; it must be more than 0 and less than 1"
            )
        if self.mean_span_length < 1:
            raise ValueError(
                f"mean_span_length is {self.mean_span_length}; a span has at least 1 token"
            )
        object.__setattr__(self, "_sentinel_array", np.array(self.sentinels, np.int64))

    def __call__(self, tokens: np.ndarray, generator: np.random.Generator) -> Sample:
        noise, spans = self.count_spans(len(tokens))
        noise_lengths = random_segments(noise, spans, generator)
        kept_lengths = random_segments(len(tokens) - noise, spans, generator)
        ends = np.cumsum(np.stack([kept_lengths, noise_lengths], axis=1).ravel())
        return self.corrupt(tokens, ends[0::2], ends[1::2])

    def corrupt(self, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Sample:
        """Makes the sample of given spans [starts, stops), which are in order and do not touch."""
        lengths = stops - starts  # [spans]
        sentinels = self._sentinel_array[: len(starts)]
        border = np.zeros(len(tokens) + 1, np.int64)
        border[starts] = 1
        border[stops] -= 1
        is_noise = np.cumsum(border[:-1]).astype(bool)  # [n]

        # The input has a sentinel in place of the first token of each span.
        inputs = tokens.astype(np.int64)
        inputs[starts] = sentinels
        is_kept = ~is_noise
        is_kept[starts] = True
        input_ids = np.append(inputs[is_kept], self.eos_token_id)

        # The target has each span after its sentinel, and the end.
        labels = np.empty(int(lengths.sum()) + len(starts) + 1, np.int64)
        sentinel_places = np.cumsum(lengths + 1) - lengths - 1
        is_content = np.ones(len(labels), bool)
        is_content[sentinel_places] = False
        is_content[-1] = False
        labels[sentinel_places] = sentinels
        labels[is_content] = tokens[is_noise]
        labels[-1] = self.eos_token_id
        return {"input_ids": input_ids, "labels": labels}

    def count_spans(self, length: int) -> tuple[int, int]:
        """Returns (corrupted tokens, spans) for a text of `length` tokens.

        Raises:
            ValueError: The text is too short or long.
        """
        if length < 2:
            raise ValueError(f"span corruption needs at least 2 tokens, not {length}")
        noise = min(max(round(length * self.noise_density), 1), length - 1)
        spans = min(max(round(noise / self.mean_span_length), 1), noise, length - noise)
        if spans > len(self.sentinels):
            raise ValueError(
                f"{length} tokens at noise density {self.noise_density} make {spans} spans, but "
                f"there are only {len(self.sentinels)} sentinels; "
                "use shorter texts, longer spans or more sentinels"
            )
        return noise, spans

    def lengths(self, length: int) -> tuple[int, int]:
        """Returns the (input, target) lengths for a text of `length` tokens, including
        end-of-sequence tokens.
        """
        noise, spans = self.count_spans(length)
        return length - noise + spans + 1, noise + spans + 1

    def raw_length(self, input_length: int, target_length: int | None = None) -> int:
        """Returns the longest text whose input fits `input_length` and whose target fits
        `target_length`.
        """
        length = 1
        while True:
            try:
                inputs, targets = self.lengths(length + 1)
            except ValueError:
                if length > 1:
                    return length
                raise
            if inputs > input_length or targets > (target_length or targets):
                break
            length += 1
        if length < 2:
            raise ValueError(
                f"no text fits an input of {input_length} and a target of {target_length} tokens"
            )
        return length


def random_segments(total: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """Divides `total` into positive lengths, every division equally likely: int64 [parts]."""
    cuts = np.sort(generator.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]).astype(np.int64))


@dataclass(frozen=True)
class PrefixLM:
    """Splits a text at a uniformly random position into a prefix and the rest to predict.

    With `decoder_only` the sample is one sequence whose labels are −100 on the prefix, and
    `prefix_length` [] is the part with bidirectional attention. Otherwise `input_ids` is the prefix
    and `labels` the rest, each ending with the end-of-sequence token. The rest is at most the share
    `longest_rest` of the text.
    """

    eos_token_id: int
    decoder_only: bool = False
    longest_rest: float = 1.0

    def __call__(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        if len(tokens) < 2:
            raise ValueError(f"a prefix and a rest need at least 2 tokens, not {len(tokens)}")
        shortest_prefix = len(tokens) - self._find_longest_rest(len(tokens))
        border = int(generator.integers(shortest_prefix, len(tokens)))
        tokens = tokens.astype(np.int64)
        if self.decoder_only:
            labels = tokens.copy()
            labels[:border] = IGNORED
            return {
                "input_ids": tokens,
                "labels": labels,
                "prefix_length": np.array(border, np.int64),
            }
        end = np.int64(self.eos_token_id)
        return {
            "input_ids": np.append(tokens[:border], end),
            "labels": np.append(tokens[border:], end),
        }

    def raw_length(self, input_length: int, target_length: int) -> int:
        """Returns the longest text whose parts, each with its end, always fit `input_length` and
        `target_length`.
        """
        # The prefix is at least one token shorter than the text, which leaves room for its end.
        longest = 1
        for length in range(2, input_length + 1):
            if self._find_longest_rest(length) < target_length:
                longest = length
        return longest

    def _find_longest_rest(self, length: int) -> int:
        """Returns the most tokens of a text of `length` that are to predict."""
        return min(max(1, int(self.longest_rest * length)), length - 1)
