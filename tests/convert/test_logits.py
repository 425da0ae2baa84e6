"""The split model computes what transformers computes."""

from __future__ import annotations

import pytest
from every_case import by_turns
from safetensors.torch import load_file, save_file

from shardzoo.cli.convert import main
from shardzoo.convert.logits import compare_logits
from shardzoo.convert.operations import split

VARIANTS = [
    "gpt2", "bert", "roberta", "t5", "t5-v1.1", "mt5", "glm",
    "bert-choices", "bert-body", "gpt2-classification", "roberta-answers",
]  # fmt: skip


def with_sensible_values(folder):
    import torch

    generator = torch.Generator().manual_seed(0)
    path = folder / "model.safetensors"
    values = {}
    for name, tensor in load_file(path).items():
        is_norm = "norm" in name.lower() or ".ln_" in name
        noise = torch.randn(tensor.shape, generator=generator) * (0.1 if is_norm else 0.3)
        values[name] = noise + 1 if is_norm and name.endswith("weight") else noise
    save_file(values, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("variant", by_turns(VARIANTS, 2))
def test_two_ranks_against_transformers(variant, zoo, tmp_path):
    source = with_sensible_values(zoo.make(tmp_path / "hf", variant, heads=4, head_size=8))
    found = compare_logits(source, 2)
    assert found.size == 2
    assert found.relative < 1e-5
    assert found.scale > 0.1
    assert ("transformers'" in found.reference) == (variant != "glm")


def test_shards_that_are_there_are_used(zoo, tmp_path, capsys):
    source = with_sensible_values(zoo.make(tmp_path / "hf", "gpt2"))
    split(source, tmp_path / "two", 2)
    assert main(["verify", str(tmp_path / "two"), "--logits"]) == 0
    assert "native TP=2 from transformers' GPT2LMHeadModel" in capsys.readouterr().out


def test_a_difference_is_found(zoo, tmp_path, monkeypatch):
    """The comparison can fail: transformers is given another checkpoint."""
    from shardzoo.convert import logits

    source = with_sensible_values(zoo.make(tmp_path / "hf", "gpt2"))
    other = with_sensible_values(zoo.make(tmp_path / "other", "gpt2"))
    tensors = load_file(other / "model.safetensors")
    tensors["transformer.h.1.mlp.c_proj.weight"][0, 0] += 0.1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    original = logits._compute_reference_logits
    monkeypatch.setattr(
        logits,
        "_compute_reference_logits",
        lambda kind, folder, *rest: original(kind, other, *rest),
    )
    assert not compare_logits(source, 2).is_close
