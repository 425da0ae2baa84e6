"""Computes the losses of rankings, with the definitions of sentence-transformers' CrossEncoder.

Each function takes the scores of the documents of each query, [B, D], and their relevance, [B, D],
which is -inf where a query has fewer than D documents.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...mpu import ParallelMesh, gather_from_dp


def binary_cross_entropy(scores: Tensor, relevance: Tensor) -> Tensor:
    """Returns the binary cross-entropy of each query's only document, [B].

    BinaryCrossEntropyLoss.
    """
    return F.binary_cross_entropy_with_logits(scores[:, 0], relevance[:, 0], reduction="none")


def ranknet(scores: Tensor, relevance: Tensor, *, mesh: ParallelMesh | None = None) -> Tensor:
    """Returns shares of the mean of -log2 sigmoid(s_i - s_j) over pairs where i is more relevant.

    Burges et al., 2005; RankNetLoss. The mean of all ranks' shares is the mean over the pairs of
    all queries of the mesh's data-parallel ranks.

    Returns:
        [B].
    """
    is_pair = relevance[:, :, None] > relevance[:, None, :]  # [B, D, D]
    is_pair &= relevance[:, None, :].isfinite()
    differences = scores[:, :, None] - scores[:, None, :]
    losses = -F.logsigmoid(differences) / math.log(2)
    sums = torch.where(is_pair, losses, 0.0).sum((1, 2))  # [B]
    pairs = gather_from_dp(is_pair.sum().view(1), mesh).to(scores.dtype).mean()
    return sums * (len(scores) / pairs.clamp(min=1e-9))


def listnet(scores: Tensor, relevance: Tensor) -> Tensor:
    """Returns the cross-entropy of softmax(scores) with softmax(relevance), [B].

    Cao et al., 2007; ListNetLoss.
    """
    is_there = relevance.isfinite()
    chances = F.log_softmax(scores.masked_fill(~is_there, -torch.inf), 1)
    wanted = F.softmax(relevance, 1)
    return -torch.where(is_there, chances.masked_fill(~is_there, 0.0) * wanted, 0.0).sum(1)


def listmle(scores: Tensor, relevance: Tensor) -> Tensor:
    """Returns shares of -log of the probability of the documents' order, [B].

    It is the Plackett-Luce model's (Xia et al., 2008; ListMLELoss): at each place, the document is
    chosen among those from there on. The order is the given one, the best first, as
    sentence-transformers takes it by default.
    """
    is_there = relevance.isfinite()
    masked = scores.masked_fill(~is_there, -1e16)
    # The log of the sum of exp(s) over the documents from each place on.
    rests = masked.flip(1).logcumsumexp(1).flip(1)
    return torch.where(is_there, rests - scores, 0.0).sum(1)
