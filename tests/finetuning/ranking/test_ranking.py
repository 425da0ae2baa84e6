"""Cross-encoders: losses against sentence-transformers' own, layouts, and the exported folder."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from every_case import every_day
from tiny_models import PRETRAINED, save_model, text

from shardzoo import finetuning as t2t
from shardzoo.finetuning.ranking import losses
from shardzoo.finetuning.ranking.objective import RankingObjective

SIZES = (3, 2, 4)  # documents of each query
SHORT = {
    "task": "reranking",
    "max_source_length": 30,
    "lr": 3e-3,
    "train_steps": 4,
    "log_interval": 1,
    "dropout_rate": 0.1,
}


def make_rankings() -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [3, 4] and relevance, -inf where there is no document."""
    torch.manual_seed(0)
    scores = torch.randn(3, 4).requires_grad_()
    relevance = torch.tensor([[0.0, 2.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 3.0]])
    for row, size in enumerate(SIZES):
        relevance[row, size:] = -torch.inf
    return scores, relevance


def test_losses_are_those_of_sentence_transformers():
    library = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    scores, relevance = make_rankings()
    flat = torch.cat([scores[row, :size] for row, size in enumerate(SIZES)])

    class StandIn(torch.nn.Module):
        num_labels = 1
        device = torch.device("cpu")

        def preprocess(self, pairs, **_):
            return {"places": torch.tensor([place for _, place in pairs])}

        def forward(self, tokens):
            return {"scores": flat[tokens["places"]]}

    places = torch.arange(sum(SIZES)).split(list(SIZES))
    inputs = [list("abc"), [part.tolist() for part in places]]
    labels = [relevance[row, :size] for row, size in enumerate(SIZES)]
    names = {"ranknet": "RankNetLoss", "listnet": "ListNetLoss", "listmle": "ListMLELoss"}
    for name, theirs in names.items():
        expected = getattr(library, theirs)(StandIn())(inputs, labels)
        found = RankingObjective(name).compute_loss(scores, relevance, None).mean()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        grads = [torch.autograd.grad(x, scores, retain_graph=True)[0] for x in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6, msg=name)


def test_losses_are_their_formulas():
    scores, relevance = make_rankings()
    row = scores[0, :3].detach().double()
    order = -sum(row[place] - row[place:].logsumexp(0) for place in range(3))
    torch.testing.assert_close(losses.listmle(scores, relevance)[0].double(), order)
    wanted = relevance[0, :3].double().softmax(0)
    expected = -(wanted * row.log_softmax(0)).sum()
    torch.testing.assert_close(losses.listnet(scores, relevance)[0].double(), expected)
    pairs = [(0, 1, 2), (0, 1, 0), (0, 2, 0), (1, 0, 1)]
    pairs += [(2, 1, 0), (2, 2, 0), (2, 3, 0), (2, 3, 1), (2, 3, 2)]
    total = sum(torch.log2(1 + torch.exp(scores[r, j] - scores[r, i])) for r, i, j in pairs)
    torch.testing.assert_close(losses.ranknet(scores, relevance).mean(), total / len(pairs))


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    for kind in ("bert", "gpt2"):
        save_model(folder / kind, PRETRAINED[kind], kind)
    pairs = [{"query": text(n % 5, 3), "document": text(n, 3), "label": n % 2} for n in range(16)]
    lists = [
        {
            "query": text(n, 3),
            "docs": [text(n + m, 2 + m) for m in range(2 + n % 3)],
            "labels": [2, 1, 0, 0][: 2 + n % 3],
        }
        for n in range(16)
    ]
    for name, records in (("pairs", pairs), ("lists", lists)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def curve(folder) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def tune(mesh, setting, output, kind, file, **arguments):
    path = str(setting / f"{file}.jsonl")
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=path,
        output_dir=str(output),
        mesh=mesh,
        **{"micro_batch_size": 4, **SHORT, **arguments},
    )
    trainer.train(valid=False)
    trainer.save_model()
    return trainer.evaluate(path)


@pytest.mark.parametrize(("kind", "file"), every_day([("bert", "lists")], more=[("gpt2", "pairs")]))
def test_layouts_learn_alike_and_cross_encoder_loads_them(setting, tmp_path, run_mesh, kind, file):
    work = partial(tune, setting=setting, kind=kind, file=file)
    values = work(None, output=tmp_path / "one")
    expected = curve(tmp_path / "one")
    assert len(expected) == 4
    assert {"ndcg@10", "mrr@10", "map@100"} <= values.keys()
    found, _ = run_mesh(2, partial(work, output=tmp_path / "split", model_parallel_size=2))
    assert curve(tmp_path / "split") == pytest.approx(expected, rel=1e-4)
    assert found == pytest.approx(values, rel=1e-3)
    replicas = {"micro_batch_size": 2, "eval_batch_size": 4, "env_type": "pytorchDDP"}
    found, _ = run_mesh(1, partial(work, output=tmp_path / "replicas", **replicas), data=2)
    assert curve(tmp_path / "replicas") == pytest.approx(expected, rel=1e-4)
    assert found == pytest.approx(values, rel=1e-3)

    if file == "lists":
        library = pytest.importorskip("sentence_transformers")
        loaded = library.CrossEncoder(str(tmp_path / "one" / "hf"), device="cpu")
        trainer = t2t.Trainer(
            model_name_or_path=str(tmp_path / "one" / "hf"),
            task="reranking",
            train_file=str(setting / "lists.jsonl"),
            max_source_length=30,
        )
        records = trainer._data.train(False)
        samples = trainer._data.samples(records)
        batch = trainer._collate()([samples[row] for row in range(4)])
        scores = trainer.objective.score(batch, trainer.model.eval())
        for row in range(4):
            pairs = [(records[row].query, document) for document in records[row].documents]
            wanted = loaded.predict(
                pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True
            )
            ours = scores[row, : len(pairs)].detach()
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.before_release
@pytest.mark.parametrize(("kind", "file"), [("bert", "lists"), ("gpt2", "pairs")])
def test_stages_of_a_pipeline_rank_alike(setting, tmp_path, run_mesh, kind, file):
    work = partial(tune, setting=setting, kind=kind, file=file)
    values = work(None, output=tmp_path / "one")
    stages = {"pipeline_parallel_size": 2, "env_type": "deepspeed+mpu"}
    for found in run_mesh(1, partial(work, output=tmp_path / "stages", **stages), pipeline=2):
        assert found == pytest.approx(values, rel=1e-3)
    assert curve(tmp_path / "stages") == pytest.approx(curve(tmp_path / "one"), rel=1e-4)


def test_mistakes(setting, tmp_path):
    def refuse(match, file="pairs", **arguments):
        with pytest.raises(ValueError, match=match):
            tune(None, setting, tmp_path / "refused", "bert", file, **arguments)

    refuse("bce is for one document", file="lists", ranking_loss="bce")
    refuse("compares the documents", ranking_loss="listnet")
    refuse("no key .nothing.", columns=("query", "nothing"))
