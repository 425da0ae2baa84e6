"""Chooses tokens from a vocabulary that is split over the ranks, which exchange a few numbers for
each row.

Scores are [R, Vp], this rank's columns; without a mesh they are complete rows. Every rank gets the
same result, because it is computed from gathered values.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ...mpu import ParallelMesh, gather_from_tp, tp_rank, tp_size


def mask_padding(logits: Tensor, vocab_size: int, mesh: ParallelMesh | None) -> Tensor:
    """Returns fp32 logits [R, Vp] in which the columns after the vocabulary are -inf."""
    scores = logits.float()
    columns = scores.shape[1]
    width = max(0, min(vocab_size - tp_rank(mesh) * columns, columns))
    if width < columns:
        if scores is logits:
            scores = scores.clone()
        scores[:, width:] = float("-inf")
    return scores


def gather_rows(scores: Tensor, vocab_size: int, mesh: ParallelMesh | None) -> Tensor:
    """Gathers scores [R, Vp] of all ranks into complete rows [R, V]."""
    return gather_from_tp(scores, mesh)[:, :vocab_size]


def log_probabilities(scores: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns this rank's columns of the log softmax over the whole vocabulary: [R, Vp]."""
    if tp_size(mesh) == 1:
        return scores.log_softmax(-1)
    parts = gather_from_tp(scores.logsumexp(-1, keepdim=True), mesh)  # [R, tp]
    return scores - parts.logsumexp(-1, keepdim=True)


def find_best(scores: Tensor, k: int, mesh: ParallelMesh | None) -> tuple[Tensor, Tensor]:
    """Returns the k highest scores of each row, descending, and their tokens: [R, k] each, fp32 and
    int64.
    """
    values, tokens = scores.topk(min(k, scores.shape[1]))
    if tp_size(mesh) == 1:
        return values, tokens
    all_values, all_tokens = _gather_pairs(values, tokens, scores.shape[1], mesh)  # [R, tp, k]
    values, order = all_values.flatten(1).topk(min(k, all_values[0].numel()))
    return values.float(), all_tokens.flatten(1).gather(1, order).long()


def choose_most_likely(scores: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the token with the highest score of each row, the first of equal ones: int64 [R]."""
    if tp_size(mesh) == 1:
        return scores.argmax(-1)
    values, tokens = scores.max(-1, keepdim=True)
    all_values, all_tokens = _gather_pairs(values, tokens, scores.shape[1], mesh)  # [R, tp, 1]
    first = all_values.flatten(1).argmax(-1, keepdim=True)
    return all_tokens.flatten(1).gather(1, first).squeeze(1).long()


def _gather_pairs(
    values: Tensor, columns: Tensor, width: int, mesh: ParallelMesh | None
) -> tuple[Tensor, Tensor]:
    """Gathers scores of all ranks, and the tokens of their columns: fp64 [R, tp, k] each.

    Args:
        values: [R, k].
        columns: int64 [R, k], the columns of `values` on this rank, of `width`. It is changed.
    """
    columns += tp_rank(mesh) * width
    # fp64 holds fp32 scores and token ids exactly, so one exchange carries both.
    pairs = gather_from_tp(torch.cat([values.double(), columns.double()], -1), mesh)  # [R, tp * 2k]
    gathered = torch.unflatten(pairs, -1, (-1, 2, values.shape[1]))  # [R, tp, 2, k]
    all_values, all_tokens = gathered.unbind(-2)
    return all_values, all_tokens


def draw_tokens(scores: Tensor, draws: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Samples a token of each row with the probabilities softmax(scores), by inverse transform
    sampling: int64 [R].

    The probabilities are summed in the order of the tokens, so the result does not depend on how
    the vocabulary is split.

    Args:
        draws: fp64 [R], uniform in [0, 1), the same on every rank.

    Raises:
        ValueError: A row has no finite probabilities.
    """
    highest = scores.max(-1, keepdim=True).values.clamp(min=torch.finfo(scores.dtype).min)  # [R, 1]
    mass = (scores - highest).double().exp().cumsum(-1)  # [R, Vp]
    parts = gather_from_tp(torch.cat([highest.double(), mass[:, -1:]], -1), mesh)  # [R, tp * 2]
    highs, totals = torch.unflatten(parts, -1, (-1, 2)).unbind(-1)  # [R, tp]
    scales = (highs - highs.amax(-1, keepdim=True)).exp()
    # Sequential sums, so that a rank's last column ends exactly where the next rank's columns
    # start.
    ends = list(accumulate((scales * totals).unbind(-1)))
    if not (torch.isfinite(ends[-1]) & (ends[-1] > 0)).all():
        raise ValueError("the model's scores are not finite, so no token can be sampled")
    target = draws * ends[-1]  # [R]
    rank = tp_rank(mesh)
    start = ends[rank - 1] if rank else torch.zeros_like(target)
    below = start[:, None] + scales[:, rank, None] * mass <= target[:, None]  # [R, Vp]
    return gather_from_tp(below.sum(-1, keepdim=True), mesh).sum(-1)


def take_from_first_rank(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the tensor of the first tensor-parallel rank; it has the same shape on every rank."""
    if tp_size(mesh) == 1:
        return tensor
    return gather_from_tp(tensor[None], mesh, dim=0)[0]


class UniformNumbers:
    """Generates uniform numbers, the same on every rank; without a seed, one comes from the first
    rank's generator.
    """

    def __init__(self, seed: int | None, mesh: ParallelMesh | None, device: torch.device) -> None:
        if seed is None:
            own = torch.randint(2**62, (1,)).to(device)
            seed = int(take_from_first_rank(own, mesh))
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def next(self, rows: int) -> Tensor:
        """Returns the next numbers: fp64 [R] in [0, 1)."""
        return torch.rand(rows, dtype=torch.float64, generator=self.generator).to(self.device)
