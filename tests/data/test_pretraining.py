"""One configuration per objective: shapes, padding and the published mT5 workload."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from shardzoo.cli.pretrain import RECIPES, read_arguments
from shardzoo.data import (
    GLMObjective,
    IndexedDataset,
    ObjectiveDataset,
    PrepareOptions,
    PretrainingData,
    build_loader,
    find_objective,
    load_tokenizer,
    prepare_dataset,
    sentinel_ids,
    train_sentencepiece,
)
from shardzoo.data.objectives import registry
from shardzoo.data.objectives.objective import Seq2SeqObjective


@pytest.fixture(scope="module")
def wordpiece_dir(texts, tmp_path_factory):
    from transformers import BertTokenizerFast

    folder = tmp_path_factory.mktemp("wordpiece")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789."
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        "the",
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").unlink()
    return folder


@pytest.fixture(scope="module")
def spiece_dir(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spiece")
    train_sentencepiece(texts, 320, folder)
    return folder


def prepare(jsonl, tokenizer_dir, tmp_path, **options):
    prepare_dataset(jsonl, tmp_path / "corpus", PrepareOptions(tokenizer_dir, **options))
    return IndexedDataset(tmp_path / "corpus"), load_tokenizer(tokenizer_dir)


def test_the_libai_workload_builds_its_batches_from_one_configuration(jsonl, spiece_dir, tmp_path):
    recipe = read_arguments(["--config", str(RECIPES / "mt5-libai.yaml")], quiet=True)
    lengths, size = (recipe.sequence_length, recipe.target_length), recipe.micro_batch_size
    config = PretrainingData(recipe.objective, *lengths, micro_batch_size=size, seed=recipe.seed)
    indexed, tokenizer = prepare(jsonl, spiece_dir, tmp_path)
    loaders = [
        iter(build_loader(config, indexed, tokenizer, rank=r, world_size=2)) for r in range(2)
    ]
    masked, raw = [], []
    for loader in loaders:
        for _ in range(3):
            batch = next(loader)
            assert batch["input_ids"].shape == batch["attention_mask"].shape == (16, 512)
            assert batch["labels"].shape == (16, 128)
            sentinels = torch.tensor(sentinel_ids(tokenizer))
            for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                spans = int(torch.isin(inputs, sentinels).sum())
                kept = int((inputs != tokenizer.pad_token_id).sum()) - 1 - spans
                masked.append(int((labels != -100).sum()) - 1 - spans)
                raw.append(kept + masked[-1])
                assert (labels == tokenizer.eos_token_id).sum() >= 1
    assert sum(masked) / sum(raw) == pytest.approx(0.15, abs=0.002)
    assert np.mean(raw) > 550  # close to what 512 inputs can hold


@pytest.mark.parametrize("objective", ["bert-nsp", "bert-sop"])
def test_bert_batches(objective, jsonl, wordpiece_dir, tmp_path):
    indexed, tokenizer = prepare(
        jsonl, wordpiece_dir, tmp_path, append_eos=False, split_sentences=True
    )
    config = PretrainingData(find_objective(objective)(whole_words=True), 128, micro_batch_size=4)
    batch = next(iter(build_loader(config, indexed, tokenizer)))
    for name in ("input_ids", "labels", "token_type_ids", "attention_mask"):
        assert batch[name].shape == (4, 128)
    assert batch["next_sentence_label"].shape == (4,)
    assert (batch["input_ids"][:, 0] == tokenizer.special_id("cls_token")).all()
    assert ((batch["labels"] == -100) | (batch["attention_mask"] == 1)).all()


def test_roberta_batches(jsonl, wordpiece_dir, tmp_path):
    indexed, tokenizer = prepare(jsonl, wordpiece_dir, tmp_path, eos_token="[SEP]")
    batch = next(
        iter(build_loader(PretrainingData("roberta", 64, micro_batch_size=4), indexed, tokenizer))
    )
    assert batch["input_ids"].shape == (4, 64)
    assert batch["attention_mask"].all()
    assert ((batch["labels"] != -100).sum(1) <= round(0.15 * 62)).all()


def test_gpt_and_prefix_lm_batches(jsonl, tokenizer_dir, tmp_path):
    indexed, tokenizer = prepare(jsonl, tokenizer_dir, tmp_path)
    batch = next(
        iter(build_loader(PretrainingData("gpt", 48, micro_batch_size=3), indexed, tokenizer))
    )
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].shape == (3, 48)
    config = PretrainingData("prefix-lm", 64, 32, micro_batch_size=3)
    batch = next(iter(build_loader(config, indexed, tokenizer)))
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((3, 64), (3, 32))


@pytest.mark.parametrize("padded", [True, False])
def test_glm_batches(padded, jsonl, tokenizer_dir, tmp_path):
    indexed, tokenizer = prepare(jsonl, tokenizer_dir, tmp_path)
    config = PretrainingData(
        GLMObjective(token=0.4, short=0.3), 96, padded=padded, micro_batch_size=8
    )
    loader = iter(build_loader(config, indexed, tokenizer, num_workers=2))
    for _ in range(10):
        batch = next(loader)
        length = batch["input_ids"].shape[1]
        assert length == 96 + 2 * 15 if padded else length <= 96 + 2 * 15
        assert batch["position_ids"].shape == (8, 2, length)
        assert batch["attention_mask"].shape == (8,)  # lengths of part A
        for labels, first in zip(batch["labels"], batch["attention_mask"], strict=True):
            assert (labels[:first] == -100).all()
            assert labels[first] != -100
        assert batch["input_ids"].max() < tokenizer.vocab_size + 9


def test_configurations_that_cannot_work_are_named(jsonl, tokenizer_dir, tmp_path):
    indexed, tokenizer = prepare(jsonl, tokenizer_dir, tmp_path)
    lacking = "'roberta' needs a tokenizer with cls_token, sep_token, mask_token; this one has no .*mask_token"
    with pytest.raises(ValueError, match=lacking + ".* use .*--kind wordpiece"):
        build_loader(PretrainingData("roberta"), indexed, tokenizer)
    names = "bart, bert-nsp, bert-sop, glm, gpt, mbart, prefix-lm, roberta, t5, ul2"
    with pytest.raises(ValueError, match=f"unknown objective 'electra'; use one of {names}"):
        build_loader(PretrainingData("electra"), indexed, tokenizer)
    tokenizer.special |= {"mask_token": 5, "cls_token": 6, "sep_token": 7}
    with pytest.raises(ValueError, match="--split-sentences"):
        build_loader(PretrainingData("bert-sop"), indexed, tokenizer)


@dataclass(frozen=True)
class Reversed(Seq2SeqObjective):
    """An objective that is not one of the registry's: the target is the input, backwards."""

    name: ClassVar[str] = "reversed"

    offset: int = 0

    def build(self, indexed, tokenizer, data):
        def reverse(tokens, generator):
            return {"input_ids": tokens, "labels": tokens[::-1][: data.target_length] + self.offset}

        return ObjectiveDataset(indexed, data.sequence_length, reverse, seed=data.seed)


def test_an_objective_is_a_class_that_the_registry_lists(
    jsonl, tokenizer_dir, tmp_path, monkeypatch
):
    indexed, tokenizer = prepare(jsonl, tokenizer_dir, tmp_path)
    listed = registry.index_by_name([*registry.OBJECTIVES.values(), Reversed])
    with pytest.raises(ValueError, match="unknown objective 'reversed'; use one of bart, "):
        build_loader(PretrainingData("reversed", 32, 8), indexed, tokenizer)
    monkeypatch.setattr(registry, "OBJECTIVES", listed)
    for objective, offset in (("reversed", 0), (Reversed(offset=7), 7)):
        batch = next(
            iter(
                build_loader(
                    PretrainingData(objective, 32, 8, micro_batch_size=2), indexed, tokenizer
                )
            )
        )
        assert batch["labels"].shape == (2, 8)
        assert torch.equal(batch["labels"], batch["input_ids"].flip(1)[:, :8] + offset)
    with pytest.raises(ValueError, match="Reversed and Reversed are both named 'reversed'"):
        registry.index_by_name([*listed.values(), Reversed])


def test_the_registry_lists_every_objective_of_the_folder():
    """A class with a name that a file of `objectives/` declares can be selected by that name."""
    named = {}
    for path in Path(registry.__file__).parent.glob("*.py"):
        for kind in ast.parse(path.read_text()).body:
            for statement in kind.body if isinstance(kind, ast.ClassDef) else ():
                is_assigned = isinstance(statement, ast.AnnAssign) and statement.value is not None
                if is_assigned and ast.unparse(statement.target) == "name":
                    named[ast.literal_eval(statement.value)] = kind.name
    assert named == {name: kind.__name__ for name, kind in registry.OBJECTIVES.items()}
    assert registry.objective_names() == sorted(named)
    assert len(named) == 10
