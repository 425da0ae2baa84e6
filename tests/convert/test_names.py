"""Old names, missing prefixes, buffers and repeated tensors come back as they were."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import hf_model

from shardzoo.convert.operations import merge, split


def rewrite(folder, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without_prefix(tensors):
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_buffers(tensors):
    masks = {
        f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
        for i in range(2)
    }
    return {**tensors, **masks, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}


def with_repeated_head(tensors):
    return {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()}


def with_head_instead_of_embedding(tensors):
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    return tensors


def with_old_norm_names(tensors):
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }


def with_everything_repeated(tensors):
    return {
        **tensors,
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(40)[None],
        "bert.pooler.dense.weight": torch.ones(16, 16),  # of a head that this model does not have
    }


def with_stale_bias(tensors):
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    embeddings = {
        f"{stack}.embed_tokens.weight": tensors["shared.weight"].clone()
        for stack in ("encoder", "decoder")
    }
    return {**tensors, name: torch.ones(32, 4), **embeddings}


OLD_FILES = {
    "gpt2 without its prefix": ("gpt2", without_prefix, 0, 0),
    "gpt2 with mask buffers": ("gpt2", with_buffers, 3, 0),
    "gpt2 with a repeated head": ("gpt2", with_repeated_head, 0, 1),
    "gpt2 with its head alone": ("gpt2", with_head_instead_of_embedding, 0, 0),
    "bert with gamma and beta": ("bert", with_old_norm_names, 0, 0),
    "bert with everything": ("bert", with_everything_repeated, 2, 2),
    "t5 with a stale bias": ("t5", with_stale_bias, 1, 2),
}


@pytest.mark.parametrize("case", OLD_FILES)
def test_old_files_come_back_as_they_were(case, zoo, hashes, tmp_path):
    variant, change, extras, ties = OLD_FILES[case]
    source = zoo.make(tmp_path / "hf", variant)
    rewrite(source, change)
    wanted = hashes(source)
    split(source, tmp_path / "two", 2)
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert (len(manifest["extras"]), len(manifest["ties"])) == (extras, ties)
    split(tmp_path / "two", tmp_path / "four", 4)
    merge(tmp_path / "four", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == wanted


def test_a_head_of_its_own_beside_a_flag_that_says_tied(zoo, hashes, tmp_path):
    """transformers 5 writes `tie_word_embeddings: true` for every T5; the file knows better."""
    source = zoo.make(tmp_path / "hf", "t5-v1.1")
    assert json.loads((source / "config.json").read_text())["tie_word_embeddings"] is True
    split(source, tmp_path / "two", 2)
    assert "head.weight" in load_file(tmp_path / "two" / "rank_00.safetensors")
    merge(tmp_path / "two", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(source)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)], ids=["first", "last"])
def test_a_head_that_differs_in_one_element_is_kept(place, hashes, tmp_path):
    """The tensors have more than 1 MiB: the comparison with the embedding reads them in several blocks."""
    model = hf_model("GPT2LMHeadModel", vocab_size=12_001)
    model.save_pretrained(tmp_path / "hf")

    def with_a_head_of_its_own(tensors):
        head = tensors["transformer.wte.weight"].clone()
        assert head.nbytes > 1 << 20
        head[place] += 1
        return {**tensors, "lm_head.weight": head}

    rewrite(tmp_path / "hf", with_a_head_of_its_own)
    split(tmp_path / "hf", tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(tmp_path / "hf")
