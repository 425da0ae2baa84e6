"""Losses of embeddings against sentence-transformers', with gradients, and poolings against its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shardzoo.finetuning.embedding import losses
from shardzoo.finetuning.embedding.metrics import measure_ranking
from shardzoo.finetuning.embedding.objective import COLUMNS, EmbeddingObjective
from shardzoo.finetuning.embedding.pooling import pool

ROWS = 5
WIDTH = 7
CASES = {
    "multiple_negatives_ranking": ("MultipleNegativesRankingLoss", 3, None),
    "cosent": ("CoSENTLoss", 2, (ROWS,)),
    "angle": ("AnglELoss", 2, (ROWS,)),
    "contrastive": ("ContrastiveLoss", 2, "binary"),
    "triplet": ("TripletLoss", 3, None),
    "margin_mse": ("MarginMSELoss", 4, (ROWS, 2)),
    "distill_kl": ("DistillKLDivLoss", 4, (ROWS, 3)),
    "cosine": ("CosineSimilarityLoss", 2, (ROWS,)),
    "online_contrastive": ("OnlineContrastiveLoss", 2, "binary"),
}


def make_batch(columns: int, scores) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    torch.manual_seed(1)
    embeddings = [torch.randn(ROWS, WIDTH).requires_grad_() for _ in range(columns)]
    if scores is None:
        return embeddings, None
    if scores == "binary":
        return embeddings, (torch.rand(ROWS) > 0.5).float()
    labels = torch.rand(scores)
    labels[1] = labels[0]  # rows of equal scores are not compared
    return embeddings, labels


def grads(loss: torch.Tensor, embeddings: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, embeddings))


@pytest.mark.parametrize("matryoshka", [(), (WIDTH, 4)])
def test_each_loss_is_that_of_sentence_transformers(matryoshka):
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    assert CASES.keys() == COLUMNS.keys()
    for name, (theirs, columns, scores) in CASES.items():
        embeddings, labels = make_batch(columns, scores)
        stand_in = SimpleNamespace(get_embedding_dimension=lambda: WIDTH)
        loss = getattr(library, theirs)(stand_in)
        expected = torch.zeros(())
        for dim in matryoshka or (None,):
            shown = embeddings
            if dim is not None:
                shown = [torch.nn.functional.normalize(x[:, :dim], dim=-1) for x in embeddings]
            expected = expected + loss.compute_loss_from_embeddings(shown, labels)
        ours = EmbeddingObjective(name, "mean", matryoshka_dims=matryoshka)
        found = ours.compute_loss(embeddings, labels, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        for grad, wanted in zip(grads(found, embeddings), grads(expected, embeddings), strict=True):
            torch.testing.assert_close(
                grad, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_ranking_and_cosent_are_their_formulas():
    """They hold where sentence-transformers is not installed, too."""
    embeddings, _ = make_batch(3, None)
    cosines = torch.zeros(ROWS, 2 * ROWS, dtype=torch.float64)
    for row in range(ROWS):
        for place in range(2 * ROWS):
            other = embeddings[1 + place // ROWS][place % ROWS]
            cosines[row, place] = torch.cosine_similarity(embeddings[0][row], other, 0)
    chances = (20 * cosines).softmax(1)
    expected = -torch.stack([chances[row, row].log() for row in range(ROWS)]).mean()
    found = losses.multiple_negatives_ranking(embeddings)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)

    embeddings, scores = make_batch(2, (ROWS,))
    similarities = [torch.cosine_similarity(a, b, 0) for a, b in zip(*embeddings, strict=True)]
    total = torch.ones(())
    for i in range(ROWS):
        for j in range(ROWS):
            if scores[i] > scores[j]:
                total = total + (20 * (similarities[j] - similarities[i])).exp()
    torch.testing.assert_close(losses.cosent(embeddings, scores), total.log(), rtol=1e-5, atol=1e-6)


def test_the_rows_of_all_replicas_are_compared(run_mesh):
    """Two ranks of half the rows have one process's loss and gradients."""

    def measure(mesh, name, embeddings, scores):
        first = mesh.dp_rank * 2
        mine = [column[first : first + 2].detach().requires_grad_() for column in embeddings]
        labels = None if scores is None else scores[first : first + 2]
        loss = EmbeddingObjective(name, "mean").compute_loss(mine, labels, mesh) / 2
        return loss.detach(), grads(loss, mine)

    for name in ("multiple_negatives_ranking", "cosent", "angle", "triplet"):
        _, columns, scores = CASES[name]
        embeddings, labels = make_batch(columns, scores)
        embeddings = [column[:4].detach().requires_grad_() for column in embeddings]
        labels = None if labels is None else labels[:4]
        whole = EmbeddingObjective(name, "mean").compute_loss(embeddings, labels, None)
        expected = grads(whole, embeddings)
        detached = [column.detach() for column in embeddings]
        work = partial(measure, name=name, embeddings=detached, scores=labels)
        (first, first_grads), (second, second_grads) = run_mesh(1, work, data=2)
        torch.testing.assert_close(first + second, whole.detach(), rtol=1e-5, atol=1e-6)
        for a, b, wanted in zip(first_grads, second_grads, expected, strict=True):
            torch.testing.assert_close(torch.cat([a, b]), wanted, rtol=1e-5, atol=1e-6)


def test_poolings_leave_out_padding():
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = {
        "cls": [hidden[0, 0], hidden[1, 0]],
        "last": [hidden[0, 2], hidden[1, 4]],
        "mean": [hidden[0, :3].mean(0), hidden[1].mean(0)],
        "weighted_mean": [
            (hidden[0, 0] + 2 * hidden[0, 1] + 3 * hidden[0, 2]) / 6,
            sum((n + 1) * hidden[1, n] for n in range(5)) / 15,
        ],
    }
    for pooling, rows in expected.items():
        torch.testing.assert_close(pool(hidden, mask, pooling), torch.stack(rows))


def test_ranking_values_by_hand():
    import numpy as np

    values = measure_ranking([np.array([0, 1, 0, 1] + [0] * 8)], [3])
    gain = 1 / np.log2(3) + 1 / np.log2(5)
    ideal = 1 + 1 / np.log2(3) + 1 / 2
    assert values == pytest.approx(
        {
            "ndcg@10": gain / ideal,
            "mrr@10": 1 / 2,
            "recall@10": 2 / 3,
            "map@100": (1 / 2 + 2 / 4) / 3,
        }
    )
