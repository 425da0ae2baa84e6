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


def without_padding(logits: Tensor, vocab_size: int, mesh: ParallelMesh | None) -> Tensor:
    """Returns fp32 logits [R, Vp] in which the columns after the vocabulary are -inf."""
    scores = logits.float()
    width = max(0, min(vocab_size - tp_rank(mesh) * scores.shape[1], scores.shape[1]))
    if width < scores.shape[1]:
        scores = scores.clone() if scores is logits else scores
        scores[:, width:] = float("-inf")
    return scores


def whole_rows(scores: Tensor, vocab_size: int, mesh: ParallelMesh | None) -> Tensor:
    """Gathers scores [R, Vp] of all ranks into complete rows [R, V]."""
    return gather_from_tp(scores, mesh)[:, :vocab_size]


def log_probabilities(scores: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns this rank's columns of the log softmax over the whole vocabulary: [R, Vp]."""
    if tp_size(mesh) == 1:
        return scores.log_softmax(-1)
    parts = gather_from_tp(scores.logsumexp(-1, keepdim=True), mesh)  # [R, tp]
    return scores - parts.logsumexp(-1, keepdim=True)


def best(scores: Tensor, k: int, mesh: ParallelMesh | None) -> tuple[Tensor, Tensor]:
    """Returns the k highest scores of each row, descending, and their tokens: [R, k] each, fp32 and
    int64.
    """
    values, tokens = scores.topk(min(k, scores.shape[1]))
    if tp_size(mesh) == 1:
        return values, tokens
    tokens += tp_rank(mesh) * scores.shape[1]
    # fp64 holds fp32 scores and token ids exactly, so one exchange carries both.
    pairs = gather_from_tp(torch.cat([values.double(), tokens.double()], -1), mesh)  # [R, tp * 2k]
    all_values, all_tokens = torch.unflatten(pairs, -1, (-1, 2, values.shape[1])).unbind(
        -2
    )  # [R, tp, k]
    values, order = all_values.flatten(1).topk(min(k, all_values[0].numel()))
    return values.float(), all_tokens.flatten(1).gather(1, order).long()


def most_likely(scores: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the token with the highest score of each row, the first of equal ones: int64 [R]."""
    if tp_size(mesh) == 1:
        return scores.argmax(-1)
    values, tokens = scores.max(-1, keepdim=True)
    tokens += tp_rank(mesh) * scores.shape[1]
    pairs = gather_from_tp(torch.cat([values.double(), tokens.double()], -1), mesh)  # [R, tp * 2]
    all_values, all_tokens = torch.unflatten(pairs, -1, (-1, 2)).unbind(-1)  # [R, tp]
    return all_tokens.gather(1, all_values.argmax(-1, keepdim=True)).squeeze(1).long()


def drawn(scores: Tensor, draws: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Samples a token of each row with the probabilities softmax(scores), by inverse transform
    sampling: int64 [R].

    The probabilities are summed in the order of the tokens, so the result does not depend on how
    the vocabulary is split.

    `draws` are fp64 [R], uniform in [0, 1), the same on every rank. ValueError if a row has no
    finite probabilities.
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


def of_first_rank(tensor: Tensor, mesh: ParallelMesh | None) -> Tensor:
    """Returns the tensor of the first tensor-parallel rank; it has the same shape on every rank."""
    return tensor if tp_size(mesh) == 1 else gather_from_tp(tensor[None], mesh, dim=0)[0]


class Draws:
    """Generates uniform numbers, the same on every rank; without a seed, one comes from the first
    rank's generator.
    """

    def __init__(self, seed: int | None, mesh: ParallelMesh | None, device: torch.device) -> None:
        if seed is None:
            own = torch.randint(2**62, (1,)).to(device)
            seed = int(of_first_rank(own, mesh))
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def next(self, rows: int) -> Tensor:
        """Returns the next numbers: fp64 [R] in [0, 1)."""
        return torch.rand(rows, dtype=torch.float64, generator=self.generator).to(self.device)
