"""Weights, tokenizer, corpus and objective that do not belong together are refused before any process starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from pretraining_runs import arguments_of, run_pretraining
from tiny_models import tiny

from shardzoo.convert import split
from shardzoo.data import load_tokenizer, prepare_corpus, train_tokenizer
from shardzoo.data.indexed.meta import meta_path
from shardzoo.data.tokenizers.tokenizer import save_tokenizer
from shardzoo.pretraining.inputs import choose_inputs
from shardzoo.trainer.launch.rank_info import RankInfo

SIZE, ADDED = 320, ["<extra one>", "<extra two>"]
WEIGHTS = ("none", "folder", "shards", "checkpoint", "run", "folder without tokenizer")
TOKENIZERS = ("none", "same", "other", "smaller", "larger")
CORPORA = ("text", "pair of same", "pair of other", "pair beside same", "pair beside other", "pair alone")
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
    weights = {"folder without tokenizer": save_gpt2(home / "bare", SIZE), "folder": save_gpt2(home / "hf", SIZE)}
    shutil.copytree(tokenizers["same"], weights["folder"], dirs_exist_ok=True)
    weights["shards"], weights["run"] = home / "shards", home / "run"
    split(weights["folder"], weights["shards"], 2)
    begin = partial(run_pretraining, folder=weights["run"], init_from=str(weights["folder"]), data=(str(texts),))
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
            found[f"pair {place} {name}"] = str(prepare_corpus(texts, folder, tokenizer=tokenizers[name]).train_prefix)
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
    return choose_inputs(arguments, RankInfo(0, 1, 0, 1))


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


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("weights", WEIGHTS)
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
            assert inputs.config.vocab_size == (SIZE if inputs.weights else inputs.config.vocab_size)
            continue
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the names are compared
            chosen(parts, weights, tokenizer, corpus, tmp_path)
        assert all(str(named[part]) in str(error.value) for part in wrong), (corpus, str(error.value))


def test_the_combinations_have_both_outcomes():
    outcomes = [problem(w, t, c) for w in WEIGHTS for t in TOKENIZERS for c in CORPORA]
    assert sum(map(bool, outcomes)) > 100
    assert sum(not outcome for outcome in outcomes) > 25
