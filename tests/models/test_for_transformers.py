"""transformers' Trainer trains models of the zoo as it trains transformers' own."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset
from every_case import by_turns
from tiny_models import save_model, tiny

import shardzoo
from shardzoo.cli import main as cli
from shardzoo.models.for_transformers import TransformersModel

CLASSES = {
    "gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM",
    "classifier": "BertForSequenceClassification",
}  # fmt: skip
TOKENIZERS = {"classifier": "bert"}


def make_samples(architecture: str) -> Dataset:
    """Rows of a data set with a column that no model takes."""
    rows = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 90, (9,), generator=generator).tolist()
        labels = (
            seed % 2
            if "Classification" in architecture
            else ids[:5]
            if "Conditional" in architecture
            else ids
        )
        rows.append(
            {"input_ids": ids, "attention_mask": [1] * 9, "labels": labels, "other": "text"}
        )
    return Dataset.from_list(rows)


def make_trainer(model, output: Path, architecture: str, **changes) -> transformers.Trainer:
    samples = make_samples(architecture)
    settings = {
        "max_steps": 5, "logging_steps": 1, "save_steps": 3, "eval_steps": 5, "eval_strategy": "steps",
        "report_to": "none", "per_device_train_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1,
        "use_cpu": True, "disable_tqdm": True, "seed": 3, **changes,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(output), **settings)
    return transformers.Trainer(model, arguments, train_dataset=samples, eval_dataset=samples)


def losses(trainer: transformers.Trainer) -> list[float]:
    return [
        row[name]
        for row in trainer.state.log_history
        for name in ("loss", "eval_loss")
        if name in row
    ]


@pytest.mark.parametrize("family", by_turns(CLASSES, 2))
def test_the_losses_are_those_of_transformers_and_the_checkpoints_are_its_own(tmp_path, family):
    architecture = CLASSES[family]
    kind = getattr(transformers, architecture)
    folder = save_model(tmp_path / "model", architecture, TOKENIZERS.get(family, family), seed=1)
    # The Trainer decays the norms of our GPT-2. Two micro-batches double the losses of other classes of transformers.
    changes = {"weight_decay": 0.0, "gradient_accumulation_steps": 2} if family == "gpt2" else {}
    oracle = make_trainer(
        kind.from_pretrained(folder), tmp_path / "oracle", architecture, **changes
    )
    oracle.train()
    trainer = make_trainer(
        TransformersModel(shardzoo.from_pretrained(folder)),
        tmp_path / "ours",
        architecture,
        **changes,
    )
    trainer.train()
    assert len(losses(trainer)) == 6
    assert losses(trainer) == pytest.approx(losses(oracle), rel=1e-5)

    again = make_trainer(
        TransformersModel(shardzoo.from_pretrained(folder)),
        tmp_path / "ours",
        architecture,
        **changes,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert losses(again) == losses(trainer)

    trainer.save_model(str(tmp_path / "saved"))
    both = (
        kind.from_pretrained(tmp_path / "saved").eval(),
        shardzoo.from_pretrained(tmp_path / "saved"),
    )
    batch = {
        name: torch.tensor(make_samples(architecture)[:2][name])
        for name in ("input_ids", "attention_mask", "labels")
    }
    found = [model(**batch).logits for model in (*both, trainer.model.eval())]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2], found[1])


def test_the_best_checkpoint_and_recomputed_activations(tmp_path):
    folder = save_model(tmp_path / "model", CLASSES["gpt2"], "gpt2", seed=1)
    model = TransformersModel(shardzoo.from_pretrained(folder))
    more = {
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    trainer = make_trainer(model, tmp_path / "run", CLASSES["gpt2"], **more)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-5"  # the highest loss is an earlier one
    assert cli.main(["convert", "verify", str(best), "--round-trip"]) == 0
    kept = shardzoo.from_pretrained(best)
    assert all(
        torch.equal(value, kept.state_dict()[name])
        for name, value in model.model.state_dict().items()
    )
    plain = loss_and_gradient(model)
    model.activation_checkpointing_enable()
    assert model.model.blocks.recompute_blocks
    assert loss_and_gradient(model) == plain
    model.activation_checkpointing_disable()
    assert not model.model.blocks.recompute_blocks
    with pytest.raises(ValueError, match="leave out every_n_layers=2"):
        model.activation_checkpointing_enable(every_n_layers=2)


def loss_and_gradient(model) -> tuple[float, float]:
    model.train().zero_grad()
    ids = torch.arange(3, 12)[None]
    loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    return loss.item(), sum(parameter.grad.abs().sum().item() for parameter in model.parameters())


def test_answers_are_generated_in_evaluations(tmp_path):
    folder = save_model(tmp_path / "model", CLASSES["t5"], "t5", seed=1)
    texts = []
    for model in (
        transformers.T5ForConditionalGeneration.from_pretrained(folder),
        TransformersModel(shardzoo.from_pretrained(folder)),
    ):
        arguments = transformers.Seq2SeqTrainingArguments(
            str(tmp_path / "run"),
            predict_with_generate=True,
            generation_max_length=7,
            report_to="none",
            use_cpu=True,
        )
        samples = make_samples(CLASSES["t5"]).remove_columns("other")
        texts.append(
            transformers.Seq2SeqTrainer(model, arguments).predict(samples).predictions.tolist()
        )
    assert texts[1] == texts[0]


def test_the_output_in_training_is_the_loss_and_other_values_when_they_are_read(tmp_path):
    folder = save_model(tmp_path / "model", CLASSES["gpt2"], "gpt2")
    model = TransformersModel(shardzoo.from_pretrained(folder))
    ids = torch.arange(3, 12)[None]
    evaluated, trained = model(input_ids=ids, labels=ids), model.train()(input_ids=ids, labels=ids)
    assert list(evaluated) == ["loss", "logits"]
    assert list(trained) == ["loss", "logits"]
    assert trained[0] is trained.loss
    assert "logits" in trained._values._lazy_values  # and not yet computed
    torch.testing.assert_close(trained.logits, evaluated["logits"])
    assert json.loads((folder / "config.json").read_text())["n_embd"] == model.config.n_embd


def test_dropout_follows_from_the_seed_and_resumes(tmp_path):
    folder = save_model(tmp_path / "model", CLASSES["bert"], "bert", seed=1)

    def trained(output: str, seed: int, **resume) -> list[float]:
        config = {**json.loads((folder / "config.json").read_text()), "hidden_dropout_prob": 0.3}
        model = TransformersModel(shardzoo.from_pretrained(folder, config=config))
        trainer = make_trainer(model, tmp_path / output, CLASSES["bert"], seed=seed)
        trainer.train(**resume)
        return losses(trainer)

    first = trained("first", 3)
    assert trained("again", 3) == first
    assert trained("other", 4) != first
    assert (
        trained("first", 3, resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
        == first
    )


def train_with_transformers(mesh, folder):
    """transformers' Trainer with a model that is not wrapped."""
    arguments = transformers.TrainingArguments(str(folder), report_to="none", use_cpu=True)
    model = shardzoo.from_config(tiny("gpt2"), mesh)
    with pytest.raises(ValueError, match=r"is split over ranks; use shardzoo\.trainer\.Trainer"):
        transformers.Trainer(model, arguments)
    return True


def test_transformers_trainer_refuses_a_split_model_that_is_not_wrapped(run_mesh, tmp_path):
    assert all(run_mesh(2, train_with_transformers, tmp_path))


def test_a_split_model_is_refused():
    with pytest.raises(ValueError, match=r"use shardzoo\.trainer\.Trainer"):
        TransformersModel(SimpleNamespace(mesh=object()))


def test_outputs_can_be_used_as_those_of_transformers(tmp_path):
    folder = save_model(tmp_path / "model", CLASSES["classifier"], "bert")
    model = TransformersModel(shardzoo.from_pretrained(folder)).train()
    inputs = {"input_ids": torch.arange(3, 12)[None], "labels": torch.tensor([1])}
    theirs = transformers.BertForSequenceClassification.from_pretrained(folder)(**inputs)
    for output in (model(**inputs), model.model(**inputs)):
        for key in ("loss", "logits", 0, 1, slice(2)):
            torch.testing.assert_close(output[key], theirs[key])
        assert [key in output for key in ("loss", "logits", "attentions")] == [True, True, False]
        assert output.get("logits") is output.logits is output.to_tuple()[1]
        assert output.get("attentions") is None
        assert dict(output).keys() == dict(output.items()).keys() == theirs.keys()
    made = type(model(**inputs))(dict(model(**inputs)))  # as accelerate converts types
    assert made.loss is made["loss"]
    assert [name for name, _ in pickle.loads(pickle.dumps(made)).items()] == ["loss", "logits"]
    assert isinstance(model(**inputs, return_dict=False), tuple)


def test_the_configuration_is_live(tmp_path):
    architecture = "GPT2ForSequenceClassification"
    folder = save_model(tmp_path / "model", architecture, "gpt2", pad_token_id=None)
    pair = (
        getattr(transformers, architecture).from_pretrained(folder),
        TransformersModel(shardzoo.from_pretrained(folder)),
    )
    ids = torch.tensor([[5, 6, 7], [8, 9, 2]])
    outputs = []
    for model in pair:
        with pytest.raises(ValueError, match=r"pad|batch"):
            model.eval()(input_ids=ids)
        model.config.pad_token_id = 2
        model.config.output_hidden_states = True
        model.config.problem_type = "multi_label_classification"
        outputs.append(model(input_ids=ids, labels=torch.tensor([[1.0, 0.0], [0.0, 1.0]])))
    for name in ("loss", "logits", "hidden_states"):
        torch.testing.assert_close(outputs[1][name], outputs[0][name])
    pair[1].save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["pad_token_id"] == 2


@pytest.mark.parametrize("bf16", [False, True])
def test_labels_are_smoothed_and_types_converted_as_by_transformers(tmp_path, bf16):
    folder = save_model(tmp_path / "model", CLASSES["t5"], "t5", seed=1)
    found = []
    for model in (
        transformers.T5ForConditionalGeneration.from_pretrained(folder),
        TransformersModel(shardzoo.from_pretrained(folder)),
    ):
        samples = make_samples(CLASSES["t5"]).remove_columns("other")
        arguments = transformers.Seq2SeqTrainingArguments(
            str(tmp_path / "run"), max_steps=2, label_smoothing_factor=0.1, bf16=bf16, logging_steps=1,
            report_to="none", use_cpu=True, disable_tqdm=True, seed=3,
        )  # fmt: skip
        collate = transformers.DataCollatorForSeq2Seq(
            transformers.AutoTokenizer.from_pretrained(folder), model
        )
        trainer = transformers.Seq2SeqTrainer(
            model, arguments, train_dataset=samples, data_collator=collate
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=2e-2 if bf16 else 1e-5)
