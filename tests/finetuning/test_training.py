"""Fine-tuning itself: t2t's three lines, every kind of model and task, and what a run leaves."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import transformers
from every_case import by_turns, every_day
from tiny_models import save_model

from shardzoo import finetuning as t2t
from shardzoo.trainer import Trainer

SHORT = {
    "max_source_length": 20,
    "max_target_length": 8,
    "lr": 1e-2,
    "train_steps": 6,
    "log_interval": 1,
}


def losses(folder) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def test_the_three_lines(checkpoints, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, data = checkpoints("t5"), str(files / "pairs.json")

    trainer_arguments = t2t.TrainerArguments(model_name_or_path=model, train_file=data)
    trainer = t2t.Trainer(arguments=trainer_arguments)
    before = trainer.evaluate(data)["loss"]
    values = trainer.train(valid=False)

    assert values == {"step": 48 // 8 * 3}
    assert trainer.evaluate(data)["loss"] < before
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "checkpoints" / "step-000018" / "tokenizer.json").exists()
    arguments = trainer.arguments
    assert (arguments.lr, arguments.epochs, arguments.micro_batch_size, arguments.weight_decay) == (
        5e-5,
        3,
        8,
        0.0,
    )
    assert (
        arguments.max_source_length,
        arguments.max_target_length,
        arguments.generation_num_beams,
    ) == (128, 128, 4)
    assert (arguments.source_id, arguments.target_id, arguments.prefix, arguments.metric) == (
        "s",
        "t",
        "",
        "sacrebleu",
    )


def test_the_trainer_of_fine_tuning_is_the_one_trainer_with_a_model(checkpoints, files, tmp_path):
    """A subclass may override the forward pass, and `train` may replace arguments, as in t2t-tuner."""

    class Doubled(t2t.Trainer):
        def forward_step(self, data, model, mems):
            output = super().forward_step(data, model, mems)
            return {"loss": 2 * output.loss}

    assert issubclass(t2t.Trainer, Trainer)
    shared = {"train_file": str(files / "pairs.json"), "lr": 1e-9, "log_interval": 1, "epochs": 1}
    for name, kind in (("plain", t2t.Trainer), ("doubled", Doubled)):
        trainer = kind(
            model_name_or_path=checkpoints("t5"), output_dir=str(tmp_path / name), **shared
        )
        values = trainer.train(valid=False, batch_size=4, dev_mode=True)
        assert (trainer.arguments.micro_batch_size, trainer.arguments.train_steps, values) == (
            4,
            10,
            {"step": 10},
        )
    doubled = [2 * loss for loss in losses(tmp_path / "plain")]
    assert losses(tmp_path / "doubled") == pytest.approx(doubled, rel=1e-5)


@pytest.mark.before_release
@pytest.mark.parametrize(
    ("kind", "file"),
    by_turns(
        every_day(
            [("gpt2", "text.txt"), ("bart", "pairs.json")],
            more=[("t5", "pairs.json"), ("gpt2", "pairs.json")],
        ),
        2,
    ),
)
def test_both_kinds_of_models_learn_alike(checkpoints, files, tmp_path, kind, file, run_mesh):
    """The zoo's in one process and split over two, and transformers': one curve, one exported model."""
    folder, data, block = (
        checkpoints(kind),
        str(files / file),
        {"block_size": 16} if file == "text.txt" else {},
    )

    def tune(mesh, name, **arguments):
        trainer = t2t.Trainer(
            model_name_or_path=folder, train_file=data, output_dir=str(tmp_path / name), mesh=mesh, **SHORT, **block,
            **arguments,
        )  # fmt: skip
        trainer.train(valid=False)
        trainer.save_model()

    tune(None, "theirs", native=False)
    tune(None, "ours")
    # The pairs have unequal lengths, which sequence parallelism pads to even ones.
    split = {"model_parallel_size": 2, "sequence_parallel": file == "pairs.json"}
    run_mesh(2, partial(tune, name="split", **split))
    curve = losses(tmp_path / "theirs")
    assert len(curve) == 6
    assert curve[-1] < curve[0]
    load = (
        transformers.AutoModelForSeq2SeqLM
        if kind in ("t5", "bart")
        else transformers.AutoModelForCausalLM
    )
    wanted = load.from_pretrained(tmp_path / "theirs" / "hf")
    for name in ("ours", "split"):
        assert losses(tmp_path / name) == pytest.approx(curve, rel=1e-4)
        model = load.from_pretrained(tmp_path / name / "hf")
        for parameter, value in wanted.named_parameters():
            torch.testing.assert_close(model.get_parameter(parameter), value, rtol=1e-3, atol=2e-4)
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / name / "hf")("red").input_ids


@pytest.mark.parametrize(
    ("stem", "embedding"),
    [
        ("Roberta", "encoder.word_embeddings"),
        ("Electra", "encoder.word_embeddings"),
        ("ModernBert", "word_embeddings"),
    ],
)
def test_a_classifier_is_new_and_its_encoder_is_not(files, tmp_path, stem, embedding):
    """A language model is stored without the layers that its family's classifier begins with."""
    folder = save_model(tmp_path / "model", f"{stem}ForMaskedLM", "bert", pad_token_id=0)
    arguments = {
        "train_file": str(files / "names.json"),
        "max_source_length": 20,
        "output_dir": str(tmp_path / "run"),
    }
    ours, theirs = (
        t2t.Trainer(model_name_or_path=str(folder), native=n, **arguments) for n in (True, False)
    )
    expected = theirs.model.get_input_embeddings().weight
    assert torch.equal(ours.model.get_parameter(f"{embedding}.weight")[: len(expected)], expected)
    assert all(parameter.isfinite().all() for parameter in ours.model.parameters())
    assert ours.positions == theirs.positions
    ours.train(valid=False)
    getattr(transformers, f"{stem}ForSequenceClassification").from_pretrained(ours.save_model())


@pytest.mark.parametrize("native", by_turns([True, False], 2))
def test_a_classifier_learns_and_is_read_again(checkpoints, files, tmp_path, native):
    trainer = t2t.Trainer(
        model_name_or_path=checkpoints("bert"), native=native, train_file=str(files / "names.json"), lr=3e-3,
        max_source_length=20, epochs=20, output_dir=str(tmp_path / "run"), log_interval=1,
        validation_file=str(files / "names.json"),
    )  # fmt: skip
    pooler = transformers.BertForPreTraining.from_pretrained(
        checkpoints("bert")
    ).bert.pooler.dense.weight
    assert torch.equal(
        trainer.model.get_parameter("pooler.weight" if native else "bert.pooler.dense.weight"),
        pooler,
    )
    values = trainer.train()
    assert values["accuracy"] > 0.9
    assert set(values) == {"loss", "accuracy", "step"}
    folder = trainer.save_model()
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "colour", "1": "none"}
    assert config["architectures"] == ["BertForSequenceClassification"]
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    records = [json.loads(line) for line in (files / "names.json").read_text().splitlines()]
    loss = hits = 0.0
    for record in records:
        output = model(
            **tokenizer(record["s"], return_tensors="pt"),
            labels=torch.tensor([config["label2id"][record["t"]]]),
        )
        loss += output.loss.item() / len(records)
        hits += config["id2label"][str(int(output.logits.argmax()))] == record["t"]
    again = t2t.Trainer(
        model_name_or_path=str(folder), native=not native, validation_file=str(files / "names.json"),
        max_source_length=20,
    )  # fmt: skip
    assert again.evaluate() == pytest.approx(
        {"loss": loss, "accuracy": hits / len(records)}, rel=1e-4
    )


@pytest.mark.parametrize(("family", "classifier"), by_turns([("gpt2", "GPT2"), ("t5", "T5")], 2))
def test_a_model_that_generates_learns_to_classify(
    family, classifier, checkpoints, files, tmp_path
):
    """The end of a row is found by its </s>, or by the padding token, which the saved configuration names."""
    data = str(files / "names.json")
    shared = {"task": "text-classification", "max_source_length": 20, "validation_file": data}
    trainer = t2t.Trainer(
        model_name_or_path=checkpoints(family),
        train_file=data,
        lr=3e-3,
        epochs=20,
        output_dir=str(tmp_path),
        **shared,
    )
    assert trainer.source.native
    values = trainer.train()
    assert values["accuracy"] > 0.9
    folder = trainer.save_model()
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is not None
    again = t2t.Trainer(model_name_or_path=str(folder), native=False, **shared)
    assert type(again.model) is getattr(transformers, f"{classifier}ForSequenceClassification")
    assert again.evaluate() == pytest.approx(
        {name: values[name] for name in ("loss", "accuracy")}, rel=1e-4
    )


def test_labels_may_be_numbers_and_layers_split(checkpoints, files, tmp_path, run_mesh):
    folder, data = checkpoints("bert"), str(files / "labels.json")

    def tune(mesh, size):
        trainer = t2t.Trainer(
            model_name_or_path=folder, train_file=data, env_type="deepspeed+mpu", model_parallel_size=size, mesh=mesh,
            output_dir=str(tmp_path / str(size)), **SHORT,
        )  # fmt: skip
        trainer.train(valid=False)
        return trainer.model.config.id2label

    assert run_mesh(1, tune, 1) == [{0: "0", 1: "1"}]
    run_mesh(2, tune, 2)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


@pytest.mark.before_release
def test_recomputation_and_compilation_change_nothing(checkpoints, files, tmp_path):
    curves = []
    for name, arguments in (
        ("plain", {}),
        ("recomputed", {"gradient_checkpointing": True}),
        ("theirs", {"gradient_checkpointing": True, "native": False}),
        ("compiled", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ):
        trainer = t2t.Trainer(
            model_name_or_path=checkpoints("t5"), train_file=str(files / "pairs.json"),
            output_dir=str(tmp_path / name), **SHORT, **arguments,
        )  # fmt: skip
        assert trainer.arguments.recompute == (
            "full" if "gradient_checkpointing" in arguments else "none"
        )
        trainer.train(valid=False)
        curves.append(losses(tmp_path / name))
    assert all(curve == pytest.approx(curves[0], rel=1e-4) for curve in curves[1:])


def test_a_run_goes_on(checkpoints, files, tmp_path):
    def tune(folder, **arguments):
        trainer = t2t.Trainer(
            model_name_or_path=checkpoints("t5"), train_file=str(files / "pairs.json"),
            output_dir=str(tmp_path / folder), lr_schedule="constant", **{**SHORT, **arguments},
        )  # fmt: skip
        trainer.convert_to_prompt_tuning(["<p0>"])
        trainer.train(valid=False)
        return [value.detach().clone() for value in trainer.model.parameters()]

    whole = tune("whole")
    tune("parts", train_steps=3)
    rest = tune("parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(rest, whole, strict=True))
    with pytest.raises(ValueError, match=r"holds another run \(saved at step 6\)"):
        tune("parts")
    tune("parts", overwrite=True, train_steps=1)
    assert len(losses(tmp_path / "parts")) == 1
