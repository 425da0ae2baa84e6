"""Measures embeddings: retrieval (nDCG, MRR, recall, MAP) and the similarity of texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RETRIEVAL_VALUES = ("ndcg@10", "mrr@10", "recall@10", "map@100")
NEAREST = 10
NEAREST_OF_MAP = 100


def measure_ranking(relevance: Sequence[np.ndarray], relevant: Sequence[int]) -> dict[str, float]:
    """Returns the mean values of queries, with the definitions of InformationRetrievalEvaluator.

    Args:
        relevance: For each query whether each candidate is relevant, from the best ranked to the
            worst.
        relevant: The number of relevant candidates of each query.
    """
    sums = dict.fromkeys(RETRIEVAL_VALUES, 0.0)
    for hits, count in zip(relevance, relevant, strict=True):
        hits = hits.astype(np.float64)
        near = hits[:NEAREST]
        discounts = 1 / np.log2(np.arange(2, NEAREST + 2))
        ideal = discounts[: min(count, NEAREST)].sum()
        sums["ndcg@10"] += (near * discounts[: len(near)]).sum() / ideal
        places = near.nonzero()[0]
        if len(places):
            sums["mrr@10"] += 1 / (places[0] + 1)
        sums["recall@10"] += near.sum() / count
        more = hits[:NEAREST_OF_MAP]
        precisions = more.cumsum() / np.arange(1, len(more) + 1)
        sums["map@100"] += (precisions * more).sum() / min(count, NEAREST_OF_MAP)
    return {name: float(total / len(relevance)) for name, total in sums.items()}


def measure_retrieval(texts: Sequence[tuple[str, ...]], embeddings: np.ndarray) -> dict[str, float]:
    """Returns how well the anchors find their positives among the texts of all other columns.

    Args:
        texts: The columns of each record: an anchor, its positive, and negatives.
        embeddings: [N, C, H] of N records and C columns.
    """
    norms = np.linalg.norm(embeddings, axis=-1, keepdims=True)
    embeddings = embeddings / np.maximum(norms, 1e-12)
    queries: dict[str, np.ndarray] = {}
    wanted: dict[str, set[str]] = {}
    corpus: dict[str, np.ndarray] = {}
    for columns, vectors in zip(texts, embeddings, strict=True):
        queries.setdefault(columns[0], vectors[0])
        wanted.setdefault(columns[0], set()).add(columns[1])
        for text, vector in zip(columns[1:], vectors[1:], strict=True):
            corpus.setdefault(text, vector)
    documents = list(corpus)
    vectors = np.stack([corpus[text] for text in documents])
    relevance: list[np.ndarray] = []
    for query, vector in queries.items():
        order = np.argsort(-(vectors @ vector), kind="stable")
        relevance.append(np.array([documents[place] in wanted[query] for place in order]))
    return measure_ranking(relevance, [len(wanted[query]) for query in queries])
