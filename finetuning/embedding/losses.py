"""Computes the losses of embeddings, with the definitions of sentence-transformers.

Each function takes the embeddings of a batch's columns of texts, such as anchors, positives and
negatives, as a list of [B, H], and returns a scalar. `scores` are the labels of the records.

The losses that compare the rows of a batch with one another take a mesh, and then compare them with
the rows of all data-parallel ranks. The mean of the ranks' losses is the loss of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...mpu import ParallelMesh, gather_from_dp
from ...mpu.mesh import SAMPLE_AXES

Distance = Callable[[Tensor, Tensor], Tensor]
TINY = 1e-6  # added to differences, as torch.nn.functional.pairwise_distance does


def compute_cosines(x: Tensor, y: Tensor) -> Tensor:
    """Returns the cosine similarity of each row of x [A, H] with each row of y [B, H]: [A, B]."""
    return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T


def compute_paired_cosines(x: Tensor, y: Tensor) -> Tensor:
    """Returns the cosine similarity of each row of x [B, H] with the same row of y: [B]."""
    return (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)


def compute_angles(x: Tensor, y: Tensor) -> Tensor:
    """Returns AnglE's similarity of the rows of x and y [B, H]: [B] (Li and Li, 2024).

    The halves of an embedding are the real and imaginary parts of complex numbers. The similarity
    is the absolute sum of both parts of their quotients, which is |cosine + sine| of normalized
    embeddings.
    """
    if x.shape[1] % 2:
        x = F.pad(x, (0, 1))
        y = F.pad(y, (0, 1))
    x = F.normalize(x, dim=-1)
    y = F.normalize(y, dim=-1)
    real_x, imaginary_x = x.chunk(2, dim=-1)
    real_y, imaginary_y = y.chunk(2, dim=-1)
    cosines = (x * y).sum(-1)
    sines = (imaginary_x * real_y - real_x * imaginary_y).sum(-1)
    return (cosines + sines).abs()


def cosine_distance(x: Tensor, y: Tensor) -> Tensor:
    """Returns 1 - the cosine similarity of the rows of x and y [B, H]: [B]."""
    return 1 - compute_paired_cosines(x, y)


def euclidean_distance(x: Tensor, y: Tensor) -> Tensor:
    """Returns the Euclidean distance of the rows of x and y [B, H]: [B]."""
    return F.pairwise_distance(x, y, p=2, eps=TINY)


def manhattan_distance(x: Tensor, y: Tensor) -> Tensor:
    """Returns the sum of absolute differences of the rows of x and y [B, H]: [B]."""
    return F.pairwise_distance(x, y, p=1, eps=TINY)


DISTANCES: dict[str, Distance] = {
    "cosine": cosine_distance,
    "euclidean": euclidean_distance,
    "manhattan": manhattan_distance,
}


def multiple_negatives_ranking(
    embeddings: Sequence[Tensor], *, scale: float = 20.0, mesh: ParallelMesh | None = None
) -> Tensor:
    """Returns the cross-entropy of finding each anchor's positive among all candidates.

    The candidates are the positives and hard negatives of all rows (Henderson et al., 2017;
    MultipleNegativesRankingLoss).

    Args:
        embeddings: Anchors, positives, and any number of hard negatives.
        scale: The factor of the cosine similarities, the inverse of a temperature.
        mesh: The rows of all its data-parallel ranks give candidates.
    """
    anchors = embeddings[0]
    candidates = torch.cat([gather_from_dp(column, mesh) for column in embeddings[1:]])
    first = 0 if mesh is None else mesh.rank_in(*SAMPLE_AXES) * len(anchors)
    similarities = compute_cosines(anchors, candidates) * scale  # [B, dp B (columns - 1)]
    positives = torch.arange(first, first + len(anchors), device=anchors.device)
    return F.cross_entropy(similarities, positives)


def cosent(
    embeddings: Sequence[Tensor],
    scores: Tensor,
    *,
    scale: float = 20.0,
    similarity: Distance = compute_paired_cosines,
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Returns log(1 + the sum of exp(s_j - s_i)) over all pairs of rows whose score i is larger.

    s are the scaled similarities of a row's two texts (Su, 2022; CoSENTLoss).

    Args:
        embeddings: Both texts of each row.
        scores: [B].
        mesh: The rows of all its data-parallel ranks are compared.
    """
    similarities = similarity(embeddings[0], embeddings[1]) * scale  # [B]
    similarities = gather_from_dp(similarities, mesh)
    scores = gather_from_dp(scores, mesh)
    # differences[i, j] = s_i - s_j enters where i's score is lower than j's.
    differences = similarities[:, None] - similarities[None, :]
    is_lower = scores[:, None] < scores[None, :]
    differences = differences.masked_fill(~is_lower, -torch.inf).flatten()
    return torch.logsumexp(torch.cat([differences.new_zeros(1), differences]), 0)


def angle(
    embeddings: Sequence[Tensor],
    scores: Tensor,
    *,
    scale: float = 20.0,
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Returns `cosent` of AnglE's similarities (Li and Li, 2024; AnglELoss)."""
    return cosent(embeddings, scores, scale=scale, similarity=compute_angles, mesh=mesh)


def triplet(
    embeddings: Sequence[Tensor], *, margin: float = 5.0, distance: str = "euclidean"
) -> Tensor:
    """Returns the mean of max(0, d(anchor, positive) - d(anchor, negative) + margin).

    Schroff et al., 2015; TripletLoss.
    """
    anchors, positives, negatives = embeddings
    measure = DISTANCES[distance]
    gaps = measure(anchors, positives) - measure(anchors, negatives)
    return F.relu(gaps + margin).mean()


def contrastive(
    embeddings: Sequence[Tensor], scores: Tensor, *, margin: float = 0.5, distance: str = "cosine"
) -> Tensor:
    """Returns the mean of (y d² + (1 - y) max(0, margin - d)²) / 2 over pairs with labels y.

    Hadsell et al., 2006; ContrastiveLoss.

    Args:
        scores: [B], 1 for texts that belong together, else 0.
    """
    first, second = embeddings
    distances = DISTANCES[distance](first, second)
    near = scores * distances.square()
    far = (1 - scores) * F.relu(margin - distances).square()
    return (near + far).mean() / 2


def online_contrastive(
    embeddings: Sequence[Tensor],
    scores: Tensor,
    *,
    margin: float = 0.5,
    distance: str = "cosine",
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Returns the sum of d² and of max(0, margin - d)² over the hard pairs of a batch.

    Hard are the pairs with label 1 that are farther apart than the nearest pair with label 0, and
    those with label 0 that are nearer than the farthest pair with label 1. Where all labels are
    equal, the mean distance takes the place of the other kind's (OnlineContrastiveLoss).

    Args:
        scores: [B], 1 for texts that belong together, else 0.
        mesh: The rows of all its data-parallel ranks are compared.
    """
    first, second = embeddings
    distances = gather_from_dp(DISTANCES[distance](first, second), mesh)
    is_near = gather_from_dp(scores, mesh) == 1
    farthest = distances.masked_fill(~is_near, -torch.inf).max()
    nearest = distances.masked_fill(is_near, torch.inf).min()
    mean = distances.mean()
    near = distances.square() * (is_near & (distances > nearest.where(~is_near.all(), mean)))
    far = F.relu(margin - distances).square()
    far = far * (~is_near & (distances < farthest.where(is_near.any(), mean)))
    return near.sum() + far.sum()


def cosine(embeddings: Sequence[Tensor], scores: Tensor) -> Tensor:
    """Returns the mean squared error of the cosine similarities of two texts to their scores [B].

    Reimers and Gurevych, 2019; CosineSimilarityLoss.
    """
    return F.mse_loss(compute_paired_cosines(embeddings[0], embeddings[1]), scores)


def margin_mse(embeddings: Sequence[Tensor], scores: Tensor) -> Tensor:
    """Returns the mean squared error of margins between positives and negatives to a teacher's.

    A margin is the dot product of anchor and positive minus that of anchor and negative
    (Hofstätter et al., 2020; MarginMSELoss).

    Args:
        scores: [B] or [B, negatives], the teacher's margins; or [B, 1 + negatives], its scores.
    """
    anchors, positives, *negatives = embeddings
    if scores.dim() == 1:
        scores = scores[:, None]
    if scores.shape[1] == len(negatives) + 1:
        scores = scores[:, :1] - scores[:, 1:]
    positive = (anchors * positives).sum(-1)
    margins = [positive - (anchors * negative).sum(-1) for negative in negatives]
    return F.mse_loss(torch.stack(margins, 1), scores)


def distill_kl(embeddings: Sequence[Tensor], scores: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns the mean KL divergence of the softmax over candidates from a teacher's, times T².

    The scores of the student are dot products (Lin et al., 2020; DistillKLDivLoss).

    Args:
        embeddings: Anchors and at least two candidates.
        scores: [B, candidates], the teacher's.
    """
    anchors, *candidates = embeddings
    products = torch.stack([(anchors * candidate).sum(-1) for candidate in candidates], 1)
    student = torch.log_softmax(products / temperature, 1)
    teacher = torch.softmax(scores / temperature, 1)
    return F.kl_div(student, teacher, reduction="batchmean") * temperature**2


def matryoshka(
    embeddings: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], Tensor], dims: Sequence[int]
) -> Tensor:
    """Returns the sum of the losses of the first `dims` elements of the embeddings, normalized.

    Kusupati et al., 2022; MatryoshkaLoss with weights of 1.

    Args:
        compute: A loss of embeddings.
    """
    total = embeddings[0].new_zeros(())
    # sentence-transformers truncates from the largest to the smallest.
    for dim in sorted(dims, reverse=True):
        total = total + compute([F.normalize(column[:, :dim], dim=-1) for column in embeddings])
    return total
