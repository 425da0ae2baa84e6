"""What a run begins from and leaves: transformers' weights, an export that transformers evaluates alike, a report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import EVERY_CASE, by_turns, every_day
from pretraining_runs import run_pretraining, train_losses
from rank_pool import RanksFailedError
from tiny_models import hf_model, save_glm

import shardzoo
from shardzoo.data import (
    IndexedDataset,
    PretrainingData,
    build_loader,
    load_tokenizer,
    train_tokenizer,
)
from shardzoo.data.indexed.meta import read_meta
from shardzoo.data.tokenizers.vocabulary import Vocabulary
from shardzoo.models import family

WEIGHTS = [
    ("gpt2", "GPT2LMHeadModel", "gpt"), ("bert", "BertForPreTraining", "bert-nsp"),
    ("bert", "BertForMaskedLM", "roberta"), ("roberta", "RobertaForMaskedLM", "roberta"),
    ("t5", "T5ForConditionalGeneration", "t5"), ("mt5", "MT5ForConditionalGeneration", "prefix-lm"),
    ("glm", "GLMModel", "glm"), ("bart", "BartForConditionalGeneration", "bart"),
    ("mbart", "MBartForConditionalGeneration", "prefix-lm"),
]  # fmt: skip
DEFAULTS = {
    "gpt2": "gpt",
    "bert": "bert-nsp",
    "roberta": "roberta",
    "t5": "t5",
    "mt5": "t5",
    "glm": "glm",
    "bart": "bart",
    "umt5": "t5",
    "llama": "gpt",
}


def save_weights(folder: Path, name: str, architecture: str, texts: Path) -> Any:
    """Writes random weights without dropout and a tokenizer of the family's kind; returns a reference model."""
    stories = [file.read_text() for file in sorted(texts.iterdir())]
    tokenizer = train_tokenizer(family(name).tokenizer, stories, 400, folder)
    if name == "glm":
        save_glm(folder, "gpt2", layers=1, dropout=0.0)
        return shardzoo.from_pretrained(folder)
    special = {
        key: tokenizer.special.get(key.removesuffix("_id"))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model = hf_model(architecture, 0.0, layers=1, vocab_size=tokenizer.vocab_size, **special)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("name", "architecture", "objective"), by_turns(WEIGHTS, 4))
def test_a_run_starts_from_the_weights_of_transformers(
    run_mesh, tmp_path, texts, name, architecture, objective
):
    weights = tmp_path / "weights"
    reference = save_weights(weights, name, architecture, texts)
    run = partial(
        run_pretraining, folder=tmp_path / "run", objective=objective, init_from=str(weights), data=(str(texts),),
        train_steps=1, warmup_steps=0, export=False,
    )  # fmt: skip
    (loss,) = train_losses(run_mesh(2, run)[0])

    tokenizer, corpus = load_tokenizer(weights), IndexedDataset(tmp_path / "run" / "data" / "train")
    assert read_meta(corpus.prefix).vocabulary == Vocabulary.from_tokenizer(
        tokenizer
    )  # not a new one
    batch = next(
        iter(build_loader(PretrainingData(objective, 64, micro_batch_size=4), corpus, tokenizer))
    )
    assert loss == pytest.approx(reference(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", DEFAULTS if EVERY_CASE else ["glm"])
def test_a_run_leaves_a_model_that_has_the_same_loss(run_mesh, tmp_path, texts, config, name):
    """The loss in metrics.jsonl, the report and the model card is that of transformers' class on the same samples.

    It also generates the same tokens.
    """
    from shardzoo.data import build_dataset, target_entropy
    from shardzoo.data.loading.pretraining import build_pad_batch
    from shardzoo.pretraining.corpora import held_out_samples
    from shardzoo.pretraining.export import write_sample

    folder = tmp_path / "run"
    run = partial(run_pretraining, folder=folder, model=str(config(name)), data=(str(texts),))
    metrics = run_mesh(2, run)[0]
    (final,) = [record["final/loss"] for record in metrics if "final/loss" in record]

    data, tokenizer = PretrainingData(DEFAULTS[name], 64, seed=0), load_tokenizer(folder / "hf")
    samples = held_out_samples(
        build_dataset(data, IndexedDataset(folder / "data" / "valid"), tokenizer), 5
    )
    chunks = [
        [samples[i] for i in part] for part in (range(4), range(4, 5))
    ]  # as they were evaluated
    batches = [build_pad_batch(data, tokenizer)(chunk) for chunk in chunks]
    model = exported(folder / "hf")
    shifted = DEFAULTS[name] == "gpt"
    counts = [
        int((batch["labels"] != -100).sum()) - shifted * len(batch["labels"]) for batch in batches
    ]
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in batches]
    assert final == pytest.approx(
        sum(map(lambda x, n: x * n, losses, counts)) / sum(counts), abs=1e-5
    )
    ours = shardzoo.from_pretrained(folder / "hf")
    if getattr(ours, "generates", "") in ("continuation", "answer"):
        ids = batches[0]["input_ids"][:2, :20]
        assert (
            ours.generate(ids, max_new_tokens=8).tolist()
            == model.generate(ids, max_new_tokens=8).tolist()
        )

    entropy = target_entropy([samples[i] for i in range(5)])
    card, report = (folder / "hf" / "README.md").read_text(), (folder / "report.html").read_text()
    for page in (card, report):
        assert f"{final:.4f} nats per target" in page
        assert f"the entropy of the same targets ({entropy:.3f})" in page
        assert "[[" in page
    assert card.startswith("---\nlibrary_name: ")
    for prompt in (
        "One two three four.",
        "One two three. " * 40,
    ):  # the second one is longer than the positions
        written = write_sample(folder / "hf", samples[0], prompt)
        assert "three" in written.lower()
        assert written.count("[[") == 1
        assert written == write_sample(folder / "hf", samples[0], prompt)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def exported(folder: Path) -> Any:
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    if not hasattr(transformers, architecture):
        return shardzoo.from_pretrained(folder)
    model, report = getattr(transformers, architecture).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values())
    transformers.AutoTokenizer.from_pretrained(folder)
    return model.eval()


def killed(mesh: Any, folder: Path, **settings: Any) -> None:
    """Trains until the second checkpoint is there, and then kills the first rank as it goes on."""

    def wait() -> None:
        while not (folder / "checkpoints" / "step-000010").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if mesh.rank == 0:
        threading.Thread(target=wait, daemon=True).start()
    run_pretraining(
        mesh, folder, save_interval=5, export=False, **{**settings, "train_steps": 10_000}
    )


EVERY_FAMILY_AND_OBJECTIVE = [
    ("gpt2", "gpt"), ("bert", "bert-nsp"), ("bert", "bert-sop"), ("roberta", "roberta"), ("t5", "ul2"),
    ("t5", "prefix-lm"), ("glm", "glm"), ("mt5", "t5"),
]  # fmt: skip


@pytest.mark.before_release
@pytest.mark.parametrize(("name", "objective"), EVERY_FAMILY_AND_OBJECTIVE)
def test_a_killed_run_resumes_bit_for_bit(run_mesh, tmp_path, texts, config, name, objective):
    settings = {
        "model": str(config(name)),
        "objective": objective,
        "data": (str(texts),),
        "lr_schedule": "constant",
    }
    with pytest.raises(Exception, match=r"died|killed|SIGKILL"):
        run_mesh(2, partial(killed, folder=tmp_path / "killed", **settings))
    saved = max(
        int(path.name[5:]) for path in (tmp_path / "killed" / "checkpoints").glob("step-??????")
    )
    last = {"train_steps": saved + 3, "save_interval": saved + 3, "export": False}
    resumed = run_mesh(
        2, partial(run_pretraining, folder=tmp_path / "killed", resume=True, **settings, **last)
    )[0]
    whole = run_mesh(2, partial(run_pretraining, folder=tmp_path / "whole", **settings, **last))[0]
    assert len(train_losses(whole)) == saved + 3
    assert train_losses(resumed) == train_losses(whole)


def test_an_evaluation_alone_finds_the_loss_of_the_run_and_leaves_nothing(
    run_mesh, tmp_path, texts, config
):
    run = partial(
        run_pretraining,
        model=str(config("bert")),
        data=(str(texts),),
        train_steps=2,
        warmup_steps=0,
    )
    metrics = run_mesh(1, partial(run, folder=tmp_path / "run"))[0]
    (final,) = [record["final/loss"] for record in metrics if "final/loss" in record]
    before = sorted(tmp_path.rglob("*"))
    again = run_mesh(2, partial(run, folder=tmp_path / "run", eval_only=True))[0]
    start = {"init_from": str(tmp_path / "run" / "hf"), "model": None}
    alone = run_mesh(
        2, partial(run_pretraining, folder=None, data=(str(texts),), eval_only=True, **start)
    )[0]
    assert again[0]["final/loss"] == pytest.approx(final, rel=1e-5)
    assert alone[0]["final/loss"] == pytest.approx(final, rel=1e-5)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.before_release
def test_a_vocabulary_without_sentinels_learns_to_continue(run_mesh, tmp_path, texts):
    weights = tmp_path / "weights"
    stories = [file.read_text() for file in sorted(texts.iterdir())]
    pieces = train_tokenizer("sentencepiece", stories, 300, weights).pieces
    (weights / "tokenizer.json").unlink()  # It has the tokens that the next line leaves out.
    (weights / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}'
    )
    hf_model("T5ForConditionalGeneration", layers=1, vocab_size=pieces).save_pretrained(weights)
    start = {"init_from": str(weights), "data": (str(texts),), "train_steps": 1, "warmup_steps": 0}
    run = partial(
        run_pretraining,
        folder=tmp_path / "run",
        objective="prefix-lm",
        sample_prompt="One two",
        **start,
    )
    run_mesh(2, run)
    assert "One two [[" in (tmp_path / "run" / "hf" / "README.md").read_text()


def test_a_head_that_the_weights_lack_is_new(run_mesh, tmp_path, texts):
    save_weights(tmp_path / "weights", "bert", "BertForMaskedLM", texts)
    start = {
        "init_from": str(tmp_path / "weights"),
        "data": (str(texts),),
        "train_steps": 1,
        "warmup_steps": 0,
    }
    run_mesh(2, partial(run_pretraining, folder=tmp_path / "run", objective="bert-nsp", **start))
    values = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert values["architectures"] == ["BertForPreTraining"]


@pytest.mark.before_release
@pytest.mark.parametrize("name", every_day(["t5"], more=["bert", "glm"]))
def test_sequence_parallelism_and_recomputation_change_nothing(
    run_mesh, tmp_path, texts, config, name
):
    lengths = {"sequence_length": 64, "target_length": 24 if name == "t5" else None}
    run = partial(run_pretraining, model=str(config(name)), export=False, train_steps=8, **lengths)
    whole = run_mesh(1, partial(run, folder=tmp_path / "whole", data=(str(texts),)))[0]
    pair = (str(tmp_path / "whole" / "data" / "train"),)
    split = partial(
        run, folder=tmp_path / "split", data=pair, sequence_parallel=True, recompute="full"
    )
    assert train_losses(run_mesh(2, split)[0]) == pytest.approx(train_losses(whole), rel=1e-5)
    bf16 = run_mesh(2, partial(run, folder=tmp_path / "bf16", data=pair, precision="bf16"))[0]
    assert train_losses(bf16) == pytest.approx(train_losses(whole), rel=2e-2)


@pytest.mark.before_release
def test_a_mixture_trains_alike_on_every_layout(run_mesh, tmp_path, texts, config):
    (tmp_path / "other").mkdir()
    for number in range(12):
        (tmp_path / "other" / f"{number}.txt").write_text(
            f"Line {number}. " + "alpha beta gamma delta. " * (20 + number)
        )
    run = partial(
        run_pretraining, model=str(config("t5")), data=(f"{texts}:0.7", f"{tmp_path / 'other'}:0.3")
    )
    whole = run_mesh(1, partial(run, folder=tmp_path / "whole", train_steps=10, save_interval=4))[0]
    resumed = {"resume": True, "train_steps": 14, "export": False}
    for tp, data_ranks in ((2, 1), (1, 2)):
        folder = tmp_path / f"{tp}"
        ranks = {"data": data_ranks}
        size = {"micro_batch_size": 4 // data_ranks, "global_batch_size": 4}
        part = run_mesh(
            tp, partial(run, folder=folder, export=False, train_steps=10, **size), **ranks
        )[0]
        assert train_losses(part) == pytest.approx(train_losses(whole), rel=1e-5)
    assert (
        len(train_losses(run_mesh(1, partial(run, folder=tmp_path / "whole", **resumed))[0])) == 14
    )


@pytest.mark.parametrize("loss", [1.0 + 1.1e-4, 1.0 - 1.1e-4, float("nan")])
def test_an_export_with_another_loss_is_an_error(loss):
    from shardzoo.pretraining.export import check_export

    check_export(Path("hf"), 1.0 + 0.9e-4, 1.0)
    with pytest.raises(ValueError, match="hf has a held-out loss of"):
        check_export(Path("hf"), loss, 1.0)


@pytest.mark.parametrize("name", every_day(["t5"], more=["gpt2", "bert"]))
def test_a_stream_trains_alike_on_every_layout_and_resumes(run_mesh, tmp_path, texts, config, name):
    run = partial(run_pretraining, model=str(config(name)), data=(str(texts),), stream=True)
    size = {"train_steps": 12, "eval_interval": 5, "save_interval": 5, "global_batch_size": 4}
    whole = run_mesh(1, partial(run, folder=tmp_path / "whole", **size))[0]
    assert not list((tmp_path / "whole" / "data").rglob("train*"))
    alone = {"export": False, "tokenizer": str(tmp_path / "whole" / "data" / "tokenizer")}
    split = partial(run, folder=tmp_path / "split", micro_batch_size=2, **{**size, **alone})
    assert train_losses(run_mesh(2, split, data=2)[0]) == pytest.approx(
        train_losses(whole), rel=1e-5
    )
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step-000012")
    resume = partial(run, folder=tmp_path / "whole", resume=True, export=False)
    again = run_mesh(1, partial(resume, **size))[0]
    assert train_losses(again) == train_losses(whole)

    # A last checkpoint that was cut off is passed over, and its steps are trained again.
    last = tmp_path / "whole" / "checkpoints" / "step-000012"
    os.truncate(next(last.glob("rank_*.safetensors")), 2000)
    again = run_mesh(1, partial(resume, **size))[0]
    assert train_losses(again) == train_losses(whole)
    with pytest.raises(RanksFailedError, match="is at step 12 already, behind train_steps=7"):
        run_mesh(1, partial(resume, **{**size, "train_steps": 7}))


def test_an_export_that_does_not_fit_the_device_is_evaluated_on_the_cpu(tmp_path, monkeypatch):
    from shardzoo.pretraining import export

    devices = []

    def evaluate(forward, model, module, samples, ranks, **settings):
        devices.append(model)
        if len(devices) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"loss": 1.5}

    class Model:
        def to(self, device):
            return device

    monkeypatch.setattr(export, "load_exported", lambda folder: Model())
    monkeypatch.setattr(export, "evaluate", evaluate)
    assert (
        export.exported_loss(tmp_path, [], batch_size=1, collate=list, device=torch.device("meta"))
        == 1.5
    )
    assert devices == [torch.device("meta"), torch.device("cpu")]


def test_a_rank_that_comes_late_finds_the_folder_as_the_others_did(
    run_mesh, tmp_path, texts, config
):
    """The processes may be joined before they check the folder, which the first one then changes."""

    def run_late(mesh: Any) -> list[dict[str, float]]:
        time.sleep(mesh.rank)
        return run_pretraining(
            mesh,
            tmp_path / "run",
            "gpt",
            model=str(config("gpt2")),
            data=(str(texts),),
            train_steps=1,
            warmup_steps=0,
            export=False,
        )

    assert len(train_losses(run_mesh(2, run_late)[0])) == 1
