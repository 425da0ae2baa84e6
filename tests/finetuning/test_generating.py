"""Texts in, texts out, and what evaluations make of them."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import sacrebleu
import torch
import transformers
from every_case import every_day
from parity import randomize
from rouge_score.rouge_scorer import RougeScorer

from shardzoo import finetuning as t2t

TEXT = "red one two new"


@pytest.fixture(scope="module")
def tuned(checkpoints, tmp_path_factory):
    """`tuned(kind)`: the folder of a model with weights so large that its texts vary."""
    made = {}

    def get(kind: str) -> str:
        if kind not in made:
            load = {
                "t5": transformers.T5ForConditionalGeneration,
                "gpt2": transformers.GPT2LMHeadModel,
            }[kind]
            model = load.from_pretrained(checkpoints(kind))
            randomize(model, 0)
            made[kind] = str(tmp_path_factory.mktemp(kind))
            transformers.AutoTokenizer.from_pretrained(checkpoints(kind)).save_pretrained(
                made[kind]
            )
            model.save_pretrained(made[kind])
        return made[kind]

    return get


def load(folder: str, native: bool, files=None, **arguments) -> t2t.Trainer:
    file = {} if files is None else {"validation_file": str(files / "pairs.json")}
    return t2t.Trainer(
        model_name_or_path=folder, native=native, task="text2text-generation", max_source_length=20,
        max_target_length=8, **file, **arguments,
    )  # fmt: skip


def theirs(folder: str, text: str, **settings) -> list[str]:
    """transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if transformers.AutoConfig.from_pretrained(folder).model_type == "t5":
        model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
        inputs = tokenizer(text, return_tensors="pt")
        skip = 0
    else:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
        inputs = tokenizer(text + "\n", return_tensors="pt")
        skip = inputs.input_ids.shape[1]
        settings["pad_token_id"] = 0
    found = model.generate(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, **settings
    )
    return tokenizer.batch_decode(found[:, skip:].tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
@pytest.mark.parametrize("native", [True, False])
def test_single_texts_are_those_of_transformers(tuned, kind, native):
    trainer = load(tuned(kind), native)
    assert (
        trainer.generate_single(TEXT) == theirs(tuned(kind), TEXT, num_beams=4, max_new_tokens=8)[0]
    )
    greedy = theirs(tuned(kind), TEXT, num_beams=1, max_new_tokens=5)[0]
    assert trainer.generate_single(TEXT, num_beams=1, max_new_tokens=5) == greedy
    assert greedy


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_diverse_texts_need_no_code_from_a_hub(tuned, kind):
    """Both kinds of models give the same; that of the zoo is held to transformers' last release that had it."""
    ours, others = (load(tuned(kind), native) for native in (True, False))
    for settings in (
        {},
        {"output_count": 4, "beam_width": 1, "num_beam_groups": 4, "diversity_penalty": 2.0},
    ):
        texts = ours.generate_diverse(TEXT, **settings)
        assert others.generate_diverse(TEXT, **settings) == texts
        assert len(texts) == settings.get("output_count", 8)
        assert len(set(texts)) > 1


def test_a_split_model_writes_the_same(tuned, run_mesh):
    folder = tuned("t5")
    whole = load(folder, True)
    wanted = whole.generate_single(TEXT), whole.generate_diverse(TEXT)

    def write(mesh):
        trainer = load(folder, True, mesh=mesh, model_parallel_size=2)
        return trainer.generate_single(TEXT), trainer.generate_diverse(TEXT)

    assert run_mesh(2, write) == [wanted, wanted]


@pytest.mark.parametrize(
    ("kind", "metric"),
    every_day([("t5", "rouge")], more=[("gpt2", "accuracy"), ("t5", "sacrebleu")]),
)
def test_generated_texts_are_measured(tuned, files, kind, metric):
    settings = {"metric": metric, "predict_with_generate": True, "generation_num_beams": 2}
    trainer = load(tuned(kind), True, files, **settings)
    values = trainer.evaluate()
    pairs = [
        json.loads(line)["translation"] for line in (files / "pairs.json").read_text().splitlines()
    ]
    texts = [
        theirs(tuned(kind), pair["s"], num_beams=2, max_new_tokens=8)[0].strip() for pair in pairs
    ]
    targets = [pair["t"] for pair in pairs]
    if metric == "sacrebleu":
        wanted = {"sacrebleu": sacrebleu.corpus_bleu(texts, [targets]).score}
    elif metric == "accuracy":
        wanted = {"accuracy": sum(map(str.__eq__, texts, targets)) / len(targets)}
    else:
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(targets, texts, strict=True)]
        wanted = {
            k: 100 * sum(s[k].fmeasure for s in scores) / len(scores)
            for k in ("rouge1", "rouge2", "rougeL")
        }
    assert values.pop("perplexity") == pytest.approx(math.exp(values.pop("loss")))
    assert values == pytest.approx(wanted)


def test_evaluations_over_ranks_are_those_of_one(tuned, files, run_mesh):
    folder, settings = (
        tuned("t5"),
        {"metric": "rouge", "predict_with_generate": True, "max_eval_samples": 11},
    )
    alone = load(folder, True, files, **settings).evaluate()

    def evaluate(mesh):
        return load(
            folder,
            True,
            files,
            mesh=mesh,
            env_type="deepspeed+mpu",
            model_parallel_size=2,
            **settings,
        ).evaluate()

    for values in run_mesh(2, evaluate, data=2):
        assert values == pytest.approx(alone, rel=1e-5)


def test_a_model_that_is_read_in_parts_is_tuned_evaluated_and_saved(
    checkpoints, files, tmp_path, run_mesh
):
    """FSDP reads each rank's rows alone, LoRA weights too, and generates with blocks gathered in turn."""
    settings = {
        "model_name_or_path": checkpoints("t5"), "train_file": str(files / "pairs.json"), "lr": 1e-2, "train_steps": 4,
        "eval_interval": 2, "predict_with_generate": True, "metric": "rouge", "validation_split": 25,
        "generation_max_length": 4, "dropout_rate": 0.0,
    }  # fmt: skip

    def tune(mesh, lora_rank, **more):
        name = f"{mesh is None}-{lora_rank}"
        trainer = t2t.Trainer(
            mesh=mesh, output_dir=str(tmp_path / name), lora_rank=lora_rank, **settings, **more
        )
        on_meta = next(trainer.model.parameters()).is_meta
        before = trainer.evaluate()
        values = trainer.train()
        text = trainer.generate_single(TEXT)
        trainer.save_model()
        return on_meta, before, values, text, next(iter(trainer.model.parameters())).numel()

    for lora_rank in (0, 2):
        _, before, values, text, _ = tune(None, lora_rank, micro_batch_size=4)
        arguments = {"env_type": "fsdp", "micro_batch_size": 2}
        for found in run_mesh(1, partial(tune, lora_rank=lora_rank, **arguments), data=2):
            assert found[0]
            assert found[1] == pytest.approx(before, rel=1e-5)
            assert found[2] == pytest.approx(values, rel=1e-4)
            assert found[3] == text
    tuned = t2t.Trainer(
        model_name_or_path=str(tmp_path / "False-0" / "hf"),
        validation_file=str(files / "pairs.json"),
    )
    alone = t2t.Trainer(
        model_name_or_path=str(tmp_path / "True-0" / "hf"),
        validation_file=str(files / "pairs.json"),
    )
    assert tuned.evaluate()["loss"] == pytest.approx(alone.evaluate()["loss"], rel=1e-4)


def test_training_evaluates_what_it_generates(checkpoints, files, tmp_path):
    trainer = t2t.Trainer(
        model_name_or_path=checkpoints("t5"), train_file=str(files / "pairs.json"), output_dir=str(tmp_path / "run"),
        predict_with_generate=True, metric="accuracy", validation_split=25, lr=1e-2, train_steps=8, eval_interval=4,
        save_best="accuracy", generation_max_length=4,
    )  # fmt: skip
    values = trainer.train()
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    logged = [record for record in records if "valid/accuracy" in record]
    assert [record["step"] for record in logged][:2] == [4, 8]
    assert set(logged[0]) == {"step", "valid/loss", "valid/perplexity", "valid/accuracy"}
    assert trainer.evaluate() == pytest.approx(
        {name: value for name, value in values.items() if name != "step"}
    )
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


def test_a_classifier_generates_nothing(checkpoints, files):
    trainer = t2t.Trainer(
        model_name_or_path=checkpoints("bert"),
        train_file=str(files / "names.json"),
        max_source_length=20,
    )
    for call in (trainer.generate_single, trainer.generate_diverse):
        with pytest.raises(ValueError, match="a model of text-classification generates no text"):
            call("red")


def test_a_text_without_tokens_is_refused(tuned):
    with pytest.raises(ValueError, match="the text '' has no tokens"):
        t2t.Trainer(model_name_or_path=tuned("gpt2")).generate_single("")
    assert torch.is_grad_enabled()
