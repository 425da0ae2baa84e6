"""Weights, tokenizer, corpus and objective that do not belong together are refused before any process starts."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from every_case import by_turns
from pretraining_runs import STEPS, arguments_of, run_pretraining
from rich.console import Console
from tiny_models import hf_model, tiny
from training import without_digests

from shardzoo.convert import split
from shardzoo.data import (
    GLMObjective,
    documents_in_memory,
    find_objective,
    load_tokenizer,
    prepare_corpus,
    train_tokenizer,
)
from shardzoo.data.indexed.meta import meta_path
from shardzoo.data.objectives.objective import PretrainingData
from shardzoo.data.objectives.registry import objective_names
from shardzoo.data.tokenizers.tokenizer import save_tokenizer
from shardzoo.models import FAMILIES, family
from shardzoo.pretraining.inputs import choose_inputs
from shardzoo.trainer.launch.rank_info import RankInfo

SIZE, ADDED = 320, ["<extra one>", "<extra two>"]
WEIGHTS = ("none", "folder", "shards", "checkpoint", "run", "folder without tokenizer")
TOKENIZERS = ("none", "same", "other", "smaller", "larger")
CORPORA = (
    "text",
    "pair of same",
    "pair of other",
    "pair beside same",
    "pair beside other",
    "pair alone",
)
ONE = RankInfo(0, 1, 0, 1)
KNOWN = ("folder", "shards", "checkpoint", "run")  # weights with a tokenizer


def stories(path: Path) -> list[str]:
    return [file.read_text() for file in sorted(path.iterdir())]


def save_gpt2(folder: Path, vocab_size: int) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    values = tiny("gpt2", layers=1, vocab_size=vocab_size)
    GPT2LMHeadModel(GPT2Config(**values)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Parts:
    """Folders by the names above."""

    weights: dict[str, str | None]
    tokenizers: dict[str, str | None]
    corpora: dict[str, str]


@pytest.fixture(scope="module")
def parts(tmp_path_factory, texts, run_mesh) -> Parts:
    home = tmp_path_factory.mktemp("parts")
    tokenizers = {
        "same": home / "same",
        "other": home / "other",
        "smaller": home / "smaller",
        "larger": home / "larger",
    }
    train_tokenizer("bpe", stories(texts), SIZE, tokenizers["same"])
    train_tokenizer("bpe", [text.upper() for text in stories(texts)], SIZE, tokenizers["other"])
    train_tokenizer("bpe", stories(texts), SIZE - 20, tokenizers["smaller"])
    larger = load_tokenizer(tokenizers["same"])
    larger.add_tokens(ADDED)
    save_tokenizer(larger, tokenizers["larger"])
    weights = {
        "folder without tokenizer": save_gpt2(home / "bare", SIZE),
        "folder": save_gpt2(home / "hf", SIZE),
    }
    shutil.copytree(tokenizers["same"], weights["folder"], dirs_exist_ok=True)
    weights["shards"], weights["run"] = home / "shards", home / "run"
    split(weights["folder"], weights["shards"], 2)
    begin = partial(
        run_pretraining, folder=weights["run"], init_from=str(weights["folder"]), data=(str(texts),)
    )
    run_mesh(1, partial(begin, train_steps=1, warmup_steps=0, export=False))
    weights["checkpoint"] = weights["run"] / "checkpoints" / "step-000001"
    return Parts(
        {"none": None} | {name: str(path) for name, path in weights.items()},
        {"none": None} | {name: str(path) for name, path in tokenizers.items()},
        {"text": str(texts)} | pairs(home, texts, tokenizers),
    )


def pairs(home: Path, texts: Path, tokenizers: dict[str, Path]) -> dict[str, str]:
    found = {}
    for name in ("same", "other"):
        for place in ("of", "beside"):
            folder = home / f"{place} {name}"
            found[f"pair {place} {name}"] = str(
                prepare_corpus(texts, folder, tokenizer=tokenizers[name]).train_prefix
            )
            if place == "of":
                shutil.rmtree(folder / "tokenizer")
            else:
                meta_path(folder / "train").unlink()
    shutil.copytree(home / "of same", home / "alone")
    meta_path(home / "alone" / "train").unlink()
    return found | {"pair alone": str(home / "alone" / "train")}


def chosen(parts: Parts, weights: str, tokenizer: str, corpus: str, tmp_path: Path):
    arguments = arguments_of(
        tmp_path / "run", model=None if parts.weights[weights] else str(tmp_path), init_from=parts.weights[weights],
        tokenizer=parts.tokenizers[tokenizer], data=(parts.corpora[corpus],),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(tiny("gpt2", layers=1)))
    return choose_inputs(arguments, ONE)


def problem(weights: str, tokenizer: str, corpus: str) -> tuple[str, ...]:
    """The parts that contradict one another, or the one that lacks what it needs; nothing if all is well."""
    if weights in KNOWN and tokenizer in ("other", "smaller", "larger"):
        return ("weights", "tokenizer")  # the larger one has more tokens than the weights
    if weights == "folder without tokenizer" and tokenizer == "larger":
        return ("weights", "tokenizer")
    if weights == "folder without tokenizer" and tokenizer == "none":
        return ("weights",)
    used = tokenizer if tokenizer != "none" else "same" if weights in KNOWN else None
    if corpus == "text":
        return ()
    if used is None:
        return () if "beside" in corpus else ("corpus",)
    if corpus == "pair alone":
        return () if tokenizer != "none" else ("corpus", "weights")
    belongs = used in ("same", "larger") if corpus.endswith("same") else used == "other"
    return () if belongs else ("corpus", "tokenizer" if tokenizer != "none" else "weights")


@pytest.mark.parametrize(("weights", "tokenizer"), by_turns(product(WEIGHTS, TOKENIZERS), 2))
def test_every_combination_is_accepted_or_refused_by_name(parts, tmp_path, weights, tokenizer):
    for corpus in CORPORA:
        named = {
            "weights": parts.weights[weights], "tokenizer": parts.tokenizers[tokenizer],
            "corpus": parts.corpora[corpus],
        }  # fmt: skip
        wrong = problem(weights, tokenizer, corpus)
        if not wrong:
            inputs = chosen(parts, weights, tokenizer, corpus, tmp_path)
            expected = parts.tokenizers["same" if tokenizer == "none" else tokenizer]
            if weights in KNOWN or tokenizer != "none":
                assert inputs.tokenizer.tokens(SIZE) == load_tokenizer(expected).tokens(SIZE)
            assert inputs.config.vocab_size == (
                SIZE if inputs.weights else inputs.config.vocab_size
            )
            continue
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the names are compared
            chosen(parts, weights, tokenizer, corpus, tmp_path)
        assert all(str(named[part]) in str(error.value) for part in wrong), (
            corpus,
            str(error.value),
        )


def test_the_combinations_have_both_outcomes():
    outcomes = [problem(w, t, c) for w in WEIGHTS for t in TOKENIZERS for c in CORPORA]
    assert sum(map(bool, outcomes)) > 100
    assert sum(not outcome for outcome in outcomes) > 25


def test_a_checkpoint_with_another_tokenizer_is_refused(parts, tmp_path):
    folder = shutil.copytree(parts.weights["checkpoint"], tmp_path / "checkpoint")
    shutil.copytree(parts.tokenizers["other"], folder, dirs_exist_ok=True)
    start = arguments_of(tmp_path / "run", init_from=str(folder), data=(parts.corpora["text"],))
    with pytest.raises(ValueError, match=rf"{folder} is damaged: tokenizer.json has [0-9,]+ bytes"):
        choose_inputs(start, ONE)
    without_digests(folder)
    with pytest.raises(ValueError, match=f"{folder} has another vocabulary"):
        choose_inputs(start, ONE)


def test_a_checkpoint_without_its_tokenizer_wants_the_one_it_records(parts, tmp_path):
    folder = without_digests(shutil.copytree(parts.weights["checkpoint"], tmp_path / "checkpoint"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    start = partial(
        arguments_of, tmp_path / "run", init_from=str(folder), data=(parts.corpora["text"],)
    )
    assert (
        choose_inputs(start(tokenizer=parts.tokenizers["same"]), ONE).tokenizer.vocab_size == SIZE
    )
    for tokenizer in (None, parts.tokenizers["other"]):
        with pytest.raises(ValueError, match=str(folder)):
            choose_inputs(start(tokenizer=tokenizer), ONE)


def test_weights_without_room_for_the_tokens_of_the_objective(tmp_path, texts):
    weights = tmp_path / "weights"
    pieces = train_tokenizer("sentencepiece", stories(texts), 300, weights).pieces
    (weights / "tokenizer.json").unlink()  # It has the tokens that the next line leaves out.
    (weights / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}'
    )
    hf_model("T5ForConditionalGeneration", layers=1, vocab_size=pieces + 99).save_pretrained(
        weights
    )
    start = {"init_from": str(weights), "data": (str(texts),)}
    with pytest.raises(
        ValueError,
        match=f"with the 100 that objective 't5' adds.*{weights} have only {pieces + 99}",
    ):
        choose_inputs(arguments_of(tmp_path / "run", "t5", **start), ONE)
    assert (
        choose_inputs(
            arguments_of(tmp_path / "run", "prefix-lm", **start), ONE
        ).tokenizer.vocab_size
        == pieces
    )


@pytest.mark.parametrize(
    ("family", "objective", "message"),
    [
        (
            "bert",
            "bert-nsp",
            r"tokenizer {same}: objective 'bert-nsp' needs a tokenizer with .*mask_token",
        ),
        ("roberta", "roberta", r"tokenizer {same}: .*mask_token"),
        ("gpt2", "t5", "objective 't5' does not fit model .*, a gpt2; use gpt$"),
        ("bert", "gpt", "a bert; use bert-nsp, bert-sop, roberta"),
        ("roberta", "bert-sop", "a roberta; use roberta"),
        ("glm", "roberta", "a glm; use glm"),
        ("mt5", "glm", "a mt5; use bart, mbart, prefix-lm, t5, ul2"),
    ],
)
def test_objectives_that_do_not_fit(parts, config, tmp_path, family, objective, message):
    arguments = arguments_of(
        tmp_path,
        objective,
        model=str(config(family)),
        tokenizer=parts.tokenizers["same"],
        data=(parts.corpora["text"],),
    )
    with pytest.raises(ValueError, match=message.format(same=parts.tokenizers["same"])):
        choose_inputs(arguments, ONE)


def test_a_glm_with_another_vocabulary_names_the_setting(parts, config, tmp_path):
    given = {
        "model": str(config("glm")),
        "tokenizer": parts.tokenizers["same"],
        "data": (parts.corpora["text"],),
    }
    with pytest.raises(
        ValueError,
        match=r"'glm' has vocabulary='bert', but this is not .* use the vocabulary gpt2$",
    ):
        choose_inputs(
            replace(arguments_of(tmp_path, **given), objective=GLMObjective(vocabulary="bert")), ONE
        )


@pytest.mark.parametrize("name", objective_names())
def test_the_shortest_length_of_an_objective(config, tmp_path, texts, name):
    """What is refused before the corpus is read would fail after it, and what is one token longer works."""
    objective = find_objective(name)
    model = next(f for f in FAMILIES if objective.format in family(f).pretrains)
    start = {"model": str(config(model)), "data": (str(texts),)}
    with pytest.raises(
        ValueError, match=f"objective '{name}' must be from {objective.shortest} to"
    ):
        choose_inputs(
            arguments_of(tmp_path, name, sequence_length=objective.shortest - 1, **start), ONE
        )
    choose_inputs(arguments_of(tmp_path, name, sequence_length=objective.shortest, **start), ONE)
    tokenizer = train_tokenizer(
        family(model).tokenizer, stories(texts), 400, tmp_path / "tokenizer"
    )
    objective().add_special_tokens(tokenizer)
    documents = documents_in_memory(
        stories(texts), tokenizer, split_sentences=objective.split_sentences
    )
    samples = objective().build(documents, tokenizer, PretrainingData(name, objective.shortest))
    assert all(
        len(samples[i]["input_ids"]) <= objective().lengths(objective.shortest)[0]
        for i in range(20)
    )
    shorter = PretrainingData(name, objective.shortest - 1)
    with pytest.raises(ValueError):  # noqa: PT011 - each objective has its own message
        objective().build(documents, tokenizer, shorter)


def test_a_discriminator_is_refused(tmp_path, texts):
    """It is not pretrained as a masked language model, which is another architecture."""
    arguments = arguments_of(
        tmp_path / "run", model="electra-small-discriminator", data=(str(texts),)
    )
    message = "electra-small-discriminator is an ElectraForPreTraining, .* works with electra-small-generator, "
    with pytest.raises(ValueError, match=message):
        choose_inputs(arguments, ONE)


def test_widths_that_cannot_be_split_are_refused_before_the_corpus_is_read(config, tmp_path, texts):
    model = str(config("bert", num_attention_heads=3, hidden_size=48, intermediate_size=2))
    arguments = arguments_of(
        tmp_path / "run", model=model, data=(str(texts),), model_parallel_size=3
    )
    with pytest.raises(
        ValueError, match=r"cannot be split 3 ways; use a tensor-parallel size from 1 to 2$"
    ):
        choose_inputs(arguments, ONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "gpt2-medium"},
            "gpt2-medium has hidden_size=1024, but the weights in .* have 32",
        ),
        ({"model": "t5-small"}, "t5-small has model_type=t5, but the weights in .* have gpt2"),
        ({"num_hidden_layers": 3}, "has num_hidden_layers=3, but the weights in .* have 1"),
        ({"sequence_length": 65}, "from 2 to the model's 64 positions, not 65"),
        ({"target_length": 8}, "target_length is for encoder-decoders"),
        (
            {"sequence_length": 63, "sequence_parallel": True, "model_parallel_size": 2},
            "are a multiple of 2",
        ),
        ({"init_from": "./nowhere"}, "init_from: ./nowhere is not a folder"),
        ({"tokenizer": "./nowhere"}, "tokenizer: ./nowhere is not a folder"),
        (
            {"eval_only": True, "init_from": None},
            "eval_only needs weights.*/run holds no complete checkpoint",
        ),
        ({"eval_sequences": 0}, "eval_sequences must be at least 1, not 0"),
        ({"final_eval_sequences": 0}, "final_eval_sequences must be at least 1, not 0"),
    ],
)
def test_arguments_that_contradict_the_weights(parts, tmp_path, changes, message):
    given = {"init_from": parts.weights["folder"], "data": (parts.corpora["text"],), **changes}
    with pytest.raises(ValueError, match=message):
        choose_inputs(arguments_of(tmp_path / "run", **given), ONE)


def test_a_tokenizer_without_padding_for_a_model_that_counts_from_it(
    parts, config, tmp_path, texts
):
    folder = tmp_path / "tokenizer"
    train_tokenizer("roberta-bpe", stories(texts), SIZE, folder)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    del values["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    arguments = arguments_of(
        tmp_path / "run", model=str(config("roberta")), tokenizer=str(folder), data=(str(texts),)
    )
    with pytest.raises(
        ValueError, match=f"the tokenizer {folder}.* does not fit a roberta: .*pad_token_id"
    ):
        choose_inputs(arguments, ONE)


def test_names_on_the_hub(parts, tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def download(name: str, *, allow_patterns: list[str], **_) -> str:
        asked[name] = allow_patterns
        return {"org/weights": parts.weights["folder"], "org/tokenizer": parts.tokenizers["same"]}[
            name
        ]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    start = {
        "init_from": "org/weights",
        "tokenizer": "org/tokenizer",
        "data": (parts.corpora["text"],),
    }
    inputs = choose_inputs(arguments_of(tmp_path / "run", **start), ONE)
    assert inputs.weights.folder == Path(parts.weights["folder"])
    assert inputs.tokenizer.vocab_size == SIZE
    assert "*.safetensors" in asked["org/weights"]
    assert "*.safetensors" not in asked["org/tokenizer"]


@pytest.mark.parametrize(
    "read", ["init_from", "load_dir", "data", "a list", "a share", "tokenizer"]
)
def test_a_run_does_not_replace_what_it_reads(parts, tmp_path, read):
    run = shutil.copytree(parts.weights["run"], tmp_path / "run")
    pair, link = str(run / "data" / "train"), tmp_path / "link"
    link.symlink_to(run)
    given = {
        "init_from": {"init_from": str(run), "data": (parts.corpora["text"],)},
        "load_dir": {
            "model": "gpt2-quickstart",
            "load_dir": str(run),
            "data": (parts.corpora["text"],),
        },
        "data": {"model": "gpt2-quickstart", "data": (f"{link}/data/train",)},
        "a list": {
            "model": "gpt2-quickstart",
            "data": (parts.corpora["text"], str(run / "arguments.yaml")),
        },
        "a share": {
            "model": "gpt2-quickstart",
            "data": (f"{parts.corpora['text']}:1", f"{pair}:1"),
        },
        "tokenizer": {
            "tokenizer": str(run / "data" / "tokenizer"),
            "data": (parts.corpora["text"],),
        },
    }[read]
    before = sorted(run.rglob("*"))
    with pytest.raises(
        ValueError, match=f"--overwrite would delete {tmp_path}/.*, which this run reads"
    ):
        choose_inputs(arguments_of(run, overwrite=True, **given), ONE)
    assert sorted(run.rglob("*")) == before
    with pytest.raises(ValueError, match="holds another run"):  # before any process starts
        choose_inputs(arguments_of(run, **given), ONE)


def failing_evaluation(mesh: Any, folder: Path, weights: str) -> list[str]:
    """Evaluates on an empty text, with temporary files in the folder; returns what is left there."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        with pytest.raises(ValueError, match="holds no text"):
            run_pretraining(
                mesh, None, eval_only=True, init_from=weights, data=(str(folder / "empty.txt"),)
            )
    finally:
        tempfile.tempdir = before
    return [path.name for path in folder.iterdir()]


def test_an_evaluation_that_fails_leaves_no_folder(parts, run_mesh, tmp_path):
    (tmp_path / "empty.txt").touch()
    run = partial(failing_evaluation, folder=tmp_path, weights=parts.weights["folder"])
    assert run_mesh(1, run)[0] == ["empty.txt"]


def test_a_folder_that_cannot_be_made(parts, run_mesh):
    """Nobody can make folders in /proc."""
    run = partial(
        run_pretraining,
        folder=Path("/proc/runs/new"),
        model="gpt2-quickstart",
        data=(parts.corpora["text"],),
    )
    with pytest.raises(Exception, match="/proc/runs/new cannot be used: No such file or directory"):
        run_mesh(1, run)


def test_one_part_of_a_mixture_with_another_vocabulary(parts, tmp_path):
    data = (f"{parts.corpora['text']}:0.5", f"{parts.corpora['pair of other']}:0.5")
    arguments = arguments_of(tmp_path / "run", init_from=parts.weights["folder"], data=data)
    with pytest.raises(
        ValueError, match=f"{parts.corpora['pair of other']} was prepared with another vocabulary"
    ):
        choose_inputs(arguments, ONE)


def test_a_prepared_pair_is_no_stream(parts, tmp_path):
    pair = parts.corpora["pair of same"]
    arguments = arguments_of(
        tmp_path / "run", tokenizer=parts.tokenizers["same"], data=(pair,), stream=True
    )
    with pytest.raises(ValueError, match=f"stream: {pair} is a prepared .bin/.idx pair"):
        choose_inputs(arguments, ONE)


def test_ids_outside_of_the_vocabulary_are_found_before_anything_is_written(
    parts, tmp_path, run_mesh
):
    """A pair of another tool records nothing, so only its ids can tell that the named tokenizer is not its own."""
    run = partial(
        run_pretraining, folder=tmp_path / "run", init_from=None, tokenizer=parts.tokenizers["smaller"],
        data=(parts.corpora["pair alone"],), model="gpt2-quickstart",
    )  # fmt: skip
    with pytest.raises(
        Exception, match=f"alone/train holds token id 3.*{parts.tokenizers['smaller']}"
    ):
        run_mesh(2, run)
    assert not (tmp_path / "run").exists()


def test_a_plan_names_its_parts_and_writes_nothing(parts, tmp_path, capsys):
    from shardzoo.pretraining.tables import run_plan

    arguments = arguments_of(
        tmp_path / "run", init_from=parts.weights["folder"], data=(parts.corpora["text"],)
    )
    Console(width=250).print(run_plan(arguments, choose_inputs(arguments, ONE)))
    shown = capsys.readouterr().out
    memory = {
        "25,056 parameters",
        parts.weights["folder"],
        parts.corpora["text"],
        f"{STEPS} = {STEPS * 256:,} tokens",
        "GiB on a rank",
    }
    assert all(
        part in shown
        for part in memory | {str(tmp_path / "run" / "hf"), "1 tensor-parallel x 1 data-parallel"}
    )
    assert "uneven" not in shown
    assert list(tmp_path.iterdir()) == []


def test_a_plan_counts_a_ranks_own_experts_and_its_padding(tmp_path):
    from shardzoo.pretraining.tables import run_facts

    arguments = arguments_of(
        tmp_path / "run", model="mixtral-quickstart", vocab_size=100, expert_parallel_size=2
    )
    inputs = choose_inputs(arguments, ONE)
    config = inputs.config.with_changes(vocab_size=100)
    hidden = config.hidden_size
    experts = config.num_hidden_layers * config.num_local_experts
    experts *= 3 * hidden * config.intermediate_size

    facts = run_facts(arguments, inputs, config, 1, 2)
    full = int(re.search(r"([\d,]+) parameters", facts["model"])[1].replace(",", ""))
    padding = 2 * (128 - 100) * hidden  # of the embedding and of the head
    assert facts["model"].endswith(
        f"{full - experts // 2 + padding:,} on a rank with {padding:,} of the vocabulary's padding"
    )
    assert facts["mesh"] == (
        "1 tensor-parallel x 2 data-parallel, of which 2 expert-parallel = 2 processes"
    )


def test_a_plan_names_uneven_work_of_several_ranks_alone(tmp_path):
    from shardzoo.pretraining.tables import run_plan

    def plan(**changes: Any) -> str:
        arguments = arguments_of(
            tmp_path / "run",
            model="gpt2-quickstart",
            num_attention_heads=6,
            num_hidden_layers=1,
            **changes,
        )
        console = Console(width=250)
        with console.capture() as shown:
            console.print(run_plan(arguments, choose_inputs(arguments, ONE)))
        return shown.get()

    assert "uneven work" not in plan(vocab_size=65)  # The padding is more than 1 % of the model.
    assert "uneven work" in plan(vocab_size=65, model_parallel_size=4)
