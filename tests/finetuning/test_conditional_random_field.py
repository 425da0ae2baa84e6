"""Fine-tuning with a conditional random field: one curve in every layout, its metrics and files, and mistakes."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from every_case import by_turns
from tiny_models import save_model, text

from shardzoo import finetuning as t2t

SHORT = {
    "max_source_length": 24, "lr": 2e-2, "train_steps": 4, "log_interval": 1, "eval_interval": 100,
    "global_batch_size": 4, "metric": "seqeval", "crf": True,
}  # fmt: skip
KINDS = ("O", "B-X", "I-X")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model without a classifier, and words with labels that follow from the words before."""
    root = tmp_path_factory.mktemp("crf")
    save_model(root / "model", "BertForMaskedLM", "bert", seed=3)
    for name, numbers in (("train", range(24)), ("valid", range(100, 111))):
        lines = []
        for number in numbers:
            words = text(number, 3 + number % 4).split()
            if number % 5 == 0:
                words[1] = "unseenword"  # of several pieces
            labels = [KINDS[min(place % 3, 1 + number % 2)] for place in range(len(words))]
            lines.append(json.dumps({"s": words, "t": labels}))
        (root / f"{name}.json").write_text("\n".join(lines))
    return root


def make(files, name, mesh=None, **arguments):
    data = {
        f"{part}_file": str(files / f"{name}.json")
        for part, name in (("train", "train"), ("validation", "valid"))
    }
    return t2t.Trainer(
        mesh=mesh, output_dir=str(files / name),
        **{"model_name_or_path": str(files / "model"), "micro_batch_size": 2, **SHORT, **data, **arguments},
    )  # fmt: skip


def curve(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def train(mesh, files, name, **arguments):
    return make(files, name, mesh, **arguments).train()


@pytest.fixture(scope="module")
def expected(files):
    """The values of a run in one process, in two micro-batches."""
    values = train(None, files, "one")
    assert set(values) == {"loss", "step", "accuracy", "f1", "precision", "recall"}
    losses = curve(files / "one")
    assert losses[-1] < losses[0]
    return values


LAYOUTS = {  # arguments, sizes of the mesh
    "tensor": ({"model_parallel_size": 2}, {}),
    "whole": ({"micro_batch_size": 4}, {}),
    "three": ({"model_parallel_size": 3}, {}),
    "replicas": ({}, {"data": 2}),
    "sharded": ({"env_type": "fsdp"}, {"data": 2}),
    "stages": ({"env_type": "deepspeed+mpu", "pipeline_parallel_size": 2}, {"pipeline": 2}),
}


@pytest.mark.parametrize("name", by_turns(LAYOUTS, 6))
def test_every_layout_has_the_same_curve_and_metrics(name, files, expected, run_mesh):
    """Tensor-parallel ranks, one micro-batch, replicas, replicas that share a model, and stages."""
    arguments, sizes = LAYOUTS[name]
    size = arguments.get("model_parallel_size", 1)
    found = run_mesh(size, partial(train, files=files, name=name, **arguments), **sizes)
    assert curve(files / name) == pytest.approx(curve(files / "one"), rel=1e-4)
    assert found[0] == pytest.approx(expected, rel=1e-3)


def test_metrics_are_those_of_the_best_labels_and_files_keep_them(files, capfd):
    import transformers

    trainer = make(files, "saved")
    trainer.train(valid=False)
    values = trainer.evaluate()
    saved = trainer.save_model()
    assert "crf_layer.*), which transformers ignores" in " ".join(capfd.readouterr().out.split())
    again = make(files, "again", model_name_or_path=str(saved), crf=False)
    assert again.model.crf_layer.transitions.equal(trainer.model.crf_layer.transitions)
    assert again.evaluate() == values

    # The field is pytorch-crf's: transitions that forbid all but one label decide, whatever the logits are.
    with torch.no_grad():
        again.model.crf_layer.start_transitions.copy_(torch.tensor([0.0, 0.0, 1e4]))
        again.model.crf_layer.transitions.fill_(-1e4)[2, 2] = 0
    names = again._data.labels.names
    rows = [json.loads(line)["t"] for line in (files / "valid.json").read_text().splitlines()]
    share = sum(row.count(names[2]) for row in rows) / sum(map(len, rows))
    assert again.evaluate()["accuracy"] == pytest.approx(share)
    _, loading = transformers.BertForTokenClassification.from_pretrained(
        saved, output_loading_info=True
    )
    assert {name.split(".")[0] for name in loading["unexpected_keys"]} == {"crf_layer"}
    assert not loading["missing_keys"]


def test_a_stored_classifier_gets_a_field_and_lora_keeps_it(files):
    trainer = make(files, "plain", crf=False, train_steps=1)
    trainer.train(valid=False)
    plain = trainer.save_model()
    tuned = make(files, "tuned", model_name_or_path=str(plain), lora_rank=2)
    assert tuned.model.token_classifier.weight.equal(trainer.model.token_classifier.weight)
    tuned.train(valid=False)
    values = tuned.evaluate()
    saved = tuned.save_model()
    again = make(files, "adapted", model_name_or_path=str(saved), crf=False)
    assert again.evaluate() == values


MISTAKES = {
    "label_smoothing": ({"label_smoothing": 0.1}, "label_smoothing is for labels that are predicted one by one"),
    "class_weights": ({"class_weights": "balanced"}, "leave class_weights out"),
    "native": ({"native": False}, "crf needs a model of the zoo"),
    "task": ({"task": "text-classification"}, "crf is for token-classification, not for text-classification"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_has_no_field_says_so(mistake, files):
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        make(files, "mistake", **arguments)


def test_a_forward_step_must_return_predictions(files):
    class Plain(t2t.Trainer):
        def forward_step(self, data, model, mems):
            output = model(**data)
            return {"loss": output.loss, "logits": output.logits}

    trainer = Plain(
        model_name_or_path=str(files / "model"),
        train_file=str(files / "train.json"),
        crf=True,
        max_source_length=24,
    )
    with pytest.raises(ValueError, match="forward_step must return the predictions"):
        trainer.evaluate(str(files / "valid.json"))
