"""What a user may get wrong, and what is said to it."""

from __future__ import annotations

import json
import os

import huggingface_hub
import pytest

from shardzoo import finetuning as t2t
from shardzoo.finetuning.arguments import FinetuningArguments
from shardzoo.finetuning.saving import open_run
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.run_folder import make_run_folder
from shardzoo.trainer.run_lock import return_folder

ARGUMENTS = [
    ({"metric": "blue"}, "metric must be one of sacrebleu, rouge, chrf.* not 'blue'"),
    ({"task": "translation"}, "task must be one of text2text-generation, text-generation"),
    ({"max_source_length": 1}, "max_source_length must be at least 2"),
    ({"validation_split": 100}, "a percentage from 0 to 99 or a share below 1"),
    ({"native": False, "model_parallel_size": 2}, "only the zoo's models support; use native=True"),
    ({"resume": True}, "resume needs output_dir"),
    ({"model_name_or_pth": "x", "train_file": "x"}, "did you mean model_name_or_path"),
    (
        {"learning_rate": 1e-3, "lr": 1e-3},
        "learning_rate and lr both set lr|lr and learning_rate both set lr",
    ),
    ({"predict_with_generate": True, "zero_stage": 3}, "use stage 2"),
    ({"save_dir": "runs"}, "save_dir='runs' is not supported in fine-tuning; set --output-dir"),
    (
        {"experiment_name": "a"},
        "experiment_name='a' is not supported in fine-tuning; set --output-dir",
    ),
    (
        {"document_mask": False},
        "document_mask=False: samples that `packing` puts into one row never see one another",
    ),
    (
        {"torch_compile_backend": "zzz"},
        "torch_compile_backend must be one of .*inductor.*, not 'zzz'",
    ),
    ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, not 0"),
    ({"lr": -1.0}, "lr must be above 0, not -1"),
    ({"train_file": "nowhere.json"}, "train_file nowhere.json does not exist"),
    ({"model_name_or_path": ""}, "model_name_or_path is missing"),
    ({"model_name_or_path": "/nowhere/at/all"}, "/nowhere/at/all is not a folder"),
]


@pytest.mark.parametrize(("keywords", "message"), ARGUMENTS)
def test_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(**({"model_name_or_path": "x"} | keywords))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pipeline_parallel_size": 3},
            "2 blocks cannot be dealt evenly to 3 pipeline stages; .* 1 or 2",
        ),
        ({"pipeline_parallel_size": 2, "num_gpus": 3}, "3 processes cannot form 2 pipeline stages"),
        (
            {"pipeline_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 9},
            "use a multiple of 2",
        ),
        ({"model_parallel_size": 5}, "4 attention heads cannot be split 5 ways"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_process_starts(
    checkpoints, files, monkeypatch, arguments, message
):
    monkeypatch.setattr("shardzoo.trainer.launch.launch.start_processes", pytest.fail)
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(
            model_name_or_path=checkpoints("bert"),
            train_file=str(files / "labels.json"),
            **arguments,
        )


def test_a_name_that_cannot_be_fetched(monkeypatch):
    def unreachable(name, **_):
        raise OSError(f"cannot reach the hub for {name}\nand so on")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ValueError,
        match=r"t5-small is not a folder, and downloading it .* failed: cannot reach the hub",
    ):
        t2t.Trainer(model_name_or_path="t5-small")


def test_a_name_is_fetched(monkeypatch, checkpoints):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: checkpoints("t5"))
    assert t2t.Trainer(model_name_or_path="t5-small").model.config.num_decoder_layers == 1


FILES = [
    (
        "t5",
        "other.json",
        {},
        "record 1: no key 's'; the keys are 'en', 'ro'; source_id and target_id name",
    ),
    ("gpt2", "other.json", {}, "record 1: no key 's'; the keys are 'en', 'ro'"),
    ("t5", "pairs.json", {"target_id": "x"}, "record 1: no key 'x'; the keys are 's', 't'"),
    ("t5", "empty.json", {}, "empty.json holds no records"),
    ("bert", "empty.json", {}, "empty.json holds no records"),
    ("gpt2", "empty.txt", {}, "fewer than one block of 8|holds no text"),
    ("t5", "broken.json", {}, "bad record in .*broken.json, record 1"),
    ("t5", "one.json", {}, "has 1 sample.* leaves none to train on; name a validation_file"),
    ("bert", "one.json", {}, "all labels of .* are 'a'; at least 2 are needed"),
    ("t5", "pairs.json", {"micro_batch_size": 64}, "fewer than the 64 of one optimizer step"),
    (
        "bert",
        "names.json",
        {"validation_file": "labels.json"},
        "the label '[01]' is not one of the model's: colour, none",
    ),
    (
        "gpt2",
        "pairs.json",
        {"max_source_length": 60},
        "max_target_length=8 is more than the model's 64",
    ),
    ("gpt2", "text.txt", {"block_size": 65}, "block_size=65 is more than the model's 64 positions"),
    (
        "bert",
        "names.json",
        {"max_source_length": 65},
        "max_source_length=65 is more than the model's 64 positions",
    ),
    (
        "t5",
        "pairs.json",
        {"task": "text-generation"},
        "does not learn text-generation; it learns text2text",
    ),
    (
        "bert",
        "names.json",
        {"task": "text-generation", "native": True},
        "does not learn text-generation",
    ),
    (
        "gpt2",
        "pairs.json",
        {"ignore_pad_token_for_loss": False},
        "for the targets of encoder-decoders",
    ),
]


@pytest.mark.parametrize(("kind", "file", "arguments", "message"), FILES)
def test_files(checkpoints, files, tmp_path, kind, file, arguments, message):
    (tmp_path / "empty.json").write_text("\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "broken.json").write_text("{\n")
    (tmp_path / "one.json").write_text('{"s": "one", "t": "a"}\n')
    paths = {
        name: str(files / name if (files / name).exists() else tmp_path / name)
        for name in (file, "labels.json")
    }
    if "validation_file" in arguments:
        arguments = {**arguments, "validation_file": paths["labels.json"]}
    short = {
        "max_source_length": 20,
        "max_target_length": 8,
        "block_size": 8,
        "output_dir": str(tmp_path / "run"),
    }
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(
            model_name_or_path=checkpoints(kind), train_file=paths[file], **{**short, **arguments}
        ).train()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "no_such"}, "no model that transformers knows"),
        ({}, "has no model_type"),
        ({"model_type": "glm"}, "no readable tokenizer"),
    ],
)
def test_models(tmp_path, values, message):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(model_name_or_path=str(tmp_path))


def test_a_family_that_the_zoo_has_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    with pytest.raises(
        ValueError, match="is a opt, which is not in the zoo; use native=False, or a model of bart"
    ):
        t2t.Trainer(model_name_or_path=str(tmp_path), native=True)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ({"a": 1}, {}, "pass FinetuningArguments, or keywords as in .*, not a dict"),
        (t2t.TrainerArguments(), {"lr": 1.0}, r"or keywords \(lr\), not both"),
    ],
)
def test_arguments_and_keywords(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(arguments, **keywords)


def test_a_trainer_without_arguments_of_fine_tuning_has_no_model():
    with pytest.raises(
        ValueError,
        match=r"there is no argument 'model_name_or_path': it is an argument of fine-tuning: use "
        r"Trainer of shardzoo\.finetuning",
    ):
        Trainer(model_name_or_path="t5")
    with pytest.raises(ValueError, match=r"pass FinetuningArguments, .*, not a TrainingArguments"):
        t2t.Trainer(TrainingArguments(epochs=1))
    trainer = Trainer(epochs=1)
    with pytest.raises(AttributeError, match="has no attribute 'freeze'"):
        trainer.freeze(encoder=True)
    with pytest.raises(AttributeError, match=r"has no attribute 'forward'$"):
        trainer.forward()
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, .* not False"):
        trainer.train(False)
    with pytest.raises(ValueError, match="evaluate needs a model and a dataset, not 'file'"):
        trainer.evaluate("file")


def test_nothing_to_train_evaluate_test_or_save(checkpoints):
    trainer = t2t.Trainer(model_name_or_path=checkpoints("t5"))
    for call, message in (
        (trainer.train, "train_file is missing"),
        (trainer.evaluate, "there is no validation data"),
        (trainer.test, "test_file is missing"),
        (trainer.save_model, "there is no run yet"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_folder_with_other_files_is_not_replaced(checkpoints, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for native in (True, False):
        with pytest.raises(ValueError, match="holds files other than a model"):
            t2t.Trainer(model_name_or_path=checkpoints("t5"), native=native).save_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


BEFORE_THE_FOLDER = [
    ({"epochs": 0}, "set epochs or train_steps"),
    ({"save_best": "rouge"}, "'rouge' is not among the validation values: loss, perplexity$"),
    (
        {"save_best": "sacrebleu", "predict_with_generate": True, "metric": "rouge"},
        "loss, perplexity, rouge1, rouge2, rougeL$",
    ),
    ({"save_best": "loss", "validation_split": 0}, "nothing validates: set a validation_file"),
    ({"load_dir": "nowhere"}, "load_dir nowhere holds no checkpoint"),
    (
        {"ignore_pad_token_for_loss": False, "task": "text-classification"},
        "for the targets of encoder-decoders",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BEFORE_THE_FOLDER)
def test_a_refused_run_leaves_no_folder(checkpoints, files, tmp_path, arguments, message):
    kind, file = ("bert", "labels.json") if "task" in arguments else ("t5", "pairs.json")
    data = {
        "train_file": str(files / file),
        "output_dir": str(tmp_path / "run"),
        "max_source_length": 20,
    }
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(model_name_or_path=checkpoints(kind), **{**data, **arguments}).train()
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_saved_nothing_is_begun_anew(checkpoints, files, tmp_path):
    """Both messages lead to what works."""
    (tmp_path / "arguments.yaml").touch()
    short = {
        "max_source_length": 20,
        "max_target_length": 8,
        "train_steps": 1,
        "output_dir": str(tmp_path),
    }

    def train(model=None, **more):
        t2t.Trainer(
            model_name_or_path=model or checkpoints("t5"), train_file=str(files / "pairs.json"), **short, **more
        ).train(valid=False)  # fmt: skip

    with pytest.raises(
        ValueError, match=r"nothing saved yet\); replace it with --overwrite, or choose"
    ):
        train()
    with pytest.raises(ValueError, match="start again with --overwrite without --resume"):
        train(resume=True)
    train(overwrite=True)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    with pytest.raises(
        ValueError, match=f"--overwrite would delete {checkpoint}, which this run reads"
    ):
        train(str(checkpoint), overwrite=True)
    assert checkpoint.exists()


def test_an_output_dir_in_a_file(checkpoints, files, tmp_path):
    (tmp_path / "file").touch()
    data = {"train_file": str(files / "pairs.json"), "output_dir": str(tmp_path / "file" / "run")}
    with pytest.raises(
        ValueError, match=r"cannot be the run's folder, because a file is in its place"
    ):
        t2t.Trainer(model_name_or_path=checkpoints("t5"), **data).train()


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [make_run_folder("models/t5") for _ in range(20)]
    assert len(set(folders)) == 20
    assert all(folder.is_dir() and folder.name.startswith("t5-") for folder in folders)
    assert make_run_folder("runs/first/hf").name.startswith("first-")


def test_one_prompt_token_is_one_token(checkpoints):
    trainer = t2t.Trainer(model_name_or_path=checkpoints("t5"))
    trainer.convert_to_prompt_tuning("<p0>")
    assert trainer.tokenizer.tokenize("<p0>") == ["<p0>"]
    assert sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) == 32


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_resumed_run_does_not_write_through_what_stands_for_its_arguments(tmp_path, kind):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    outside.write_text("mine")
    os.mkfifo(run / "arguments.yaml") if kind == "fifo" else (run / "arguments.yaml").symlink_to(
        outside
    )
    opened = open_run(
        FinetuningArguments(model_name_or_path="x", output_dir=str(run), resume=True),
        lambda folder: None,
    )
    return_folder(opened.path)
    assert outside.read_text() == "mine"
    assert not (run / "arguments.yaml").is_symlink()
    assert "model_name_or_path: x" in (run / "arguments.yaml").read_text()
