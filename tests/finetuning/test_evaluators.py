"""The values of evaluations are those of sentence-transformers' evaluators."""

from __future__ import annotations

import json

import pytest
from tiny_models import save_model, text

from shardzoo import finetuning as t2t

ROWS = 24


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def evaluate(folder, task, file):
    trainer = t2t.Trainer(
        model_name_or_path=str(folder), task=task, train_file=file, max_source_length=40
    )
    return trainer.evaluate(file)


def test_retrieval_and_similarity(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.evaluation import (
        EmbeddingSimilarityEvaluator,
        InformationRetrievalEvaluator,
    )

    folder = save_model(tmp_path / "bert", "BertModel", "bert", seed=1)
    model = library.SentenceTransformer(str(folder), device="cpu")
    # Some anchors have several positives, and some texts are in several records.
    triplets = [
        {"anchor": text(n % 20, 3), "positive": text(n % 15, 2), "negative": text(n % 9 + 90, 4)}
        for n in range(ROWS)
    ]
    found = evaluate(folder, "embedding", write(tmp_path / "triplets.jsonl", triplets))
    documents: dict[str, str] = {}
    for record in triplets:
        for name in ("positive", "negative"):
            documents.setdefault(record[name], str(len(documents)))
    queries = {record["anchor"]: f"q{number}" for number, record in enumerate(triplets)}
    relevant: dict[str, set[str]] = {}
    for record in triplets:
        wanted = relevant.setdefault(queries[record["anchor"]], set())
        wanted.add(documents[record["positive"]])
    evaluator = InformationRetrievalEvaluator(
        {key: words for words, key in queries.items()},
        {key: words for words, key in documents.items()},
        relevant,
        show_progress_bar=False,
    )
    theirs = evaluator(model)
    for name in ("ndcg@10", "mrr@10", "recall@10", "map@100"):
        assert found[name] == pytest.approx(theirs[f"cosine_{name}"], abs=1e-6), name

    pairs = [
        {"first": text(n, 3), "second": text(n % 7, 4), "score": n * 7 % 11 / 10}
        for n in range(ROWS)
    ]
    found = evaluate(folder, "embedding", write(tmp_path / "pairs.jsonl", pairs))
    columns = ([record[name] for record in pairs] for name in ("first", "second", "score"))
    theirs = EmbeddingSimilarityEvaluator(*columns, main_similarity="cosine")(model)
    assert found["spearmanr"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)
    assert found["pearsonr"] == pytest.approx(theirs["pearson_cosine"], abs=1e-6)


def test_reranking(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    folder = save_model(
        tmp_path / "bert", "BertForSequenceClassification", "bert", seed=4, num_labels=1
    )
    model = library.CrossEncoder(str(folder), device="cpu")
    records = []
    samples = []
    for n in range(ROWS):
        size = 3 + n % 12
        documents = [text(n + 40 * m, 2 + m % 4) for m in range(1, size + 1)]
        labels = [int((n + m) % 3 == 0) for m in range(size)]
        records.append({"query": text(n, 3), "docs": documents, "labels": labels})
        named = {
            name: [words for words, label in zip(documents, labels, strict=True) if label == value]
            for name, value in (("positive", 1), ("negative", 0))
        }
        samples.append({"query": text(n, 3), **named})
    found = evaluate(folder, "reranking", write(tmp_path / "lists.jsonl", records))
    theirs = CrossEncoderRerankingEvaluator(samples, at_k=10, show_progress_bar=False)(model)
    assert found["map@100"] == pytest.approx(theirs["map"], abs=1e-6)
    assert found["mrr@10"] == pytest.approx(theirs["mrr@10"], abs=1e-6)
    assert found["ndcg@10"] == pytest.approx(theirs["ndcg@10"], abs=1e-6)
