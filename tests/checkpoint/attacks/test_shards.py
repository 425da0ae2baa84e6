"""Damaged, swapped and forged folders of shards and mp_rank files."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardzoo.checkpoint.manifest import Manifest
from shardzoo.convert.operations import merge, split


@pytest.fixture
def shards(arena, gpt2_shards):
    return arena.copy(gpt2_shards)


def flip(path, position, bit=0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "tensor", ["word_embeddings.weight", "blocks.1.mlp.down.weight", "final_norm.bias"]
)
def test_a_flipped_bit_in_the_data(rank, tensor, arena, shards):
    path = shards / f"rank_{rank:02d}.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    first, last = json.loads(path.read_bytes()[8 : 8 + length])[tensor]["data_offsets"]
    flip(path, 8 + length + (first + last) // 2, bit=3)
    refusal = arena.refused_merge(shards)
    assert f"tensor {tensor}" in refusal
    assert path.name in refusal
    assert "differs" in refusal or "damaged" in refusal


def test_any_flipped_bit_is_refused_or_harmless(arena, gpt2_shards, gpt2_folder, hashes):
    """Everywhere in every file; harmless is only what no tensor depends on, such as the header's metadata."""
    wanted, chosen = hashes(gpt2_folder), random.Random(0)
    refused = 0
    for attempt in range(150):
        source = arena.folder / f"source-{attempt}"
        shutil.copytree(gpt2_shards, source)
        path = source / chosen.choice(
            ["rank_00.safetensors", "rank_01.safetensors", "manifest.json"]
        )
        size = path.stat().st_size
        header = (
            8 + int.from_bytes(path.read_bytes()[:8], "little")
            if path.suffix == ".safetensors"
            else size
        )
        flip(path, chosen.randrange(header if attempt % 2 else size), chosen.randrange(8))
        code, _ = arena.convert("merge", source, arena.destination)
        if code == 0:
            assert hashes(arena.destination) == wanted
            shutil.rmtree(arena.destination)
        else:
            refused += 1
            assert code == 2
            assert not arena.destination.exists()
        shutil.rmtree(source)
    assert refused > 120


def test_a_flipped_bit_in_the_padding(arena, shards):
    path = shards / "rank_01.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    _, last = json.loads(path.read_bytes()[8 : 8 + length])["word_embeddings.weight"][
        "data_offsets"
    ]
    flip(path, 8 + length + last - 1)
    assert "word_embeddings.weight" in arena.refused_merge(shards)


def test_ranks_swapped(arena, shards):
    (shards / "rank_00.safetensors").rename(shards / "x")
    (shards / "rank_01.safetensors").rename(shards / "rank_00.safetensors")
    (shards / "x").rename(shards / "rank_01.safetensors")
    assert "damaged" in arena.refused_merge(shards)


def test_ranks_duplicated(arena, shards):
    shutil.copy(shards / "rank_00.safetensors", shards / "rank_01.safetensors")
    assert "rank_01.safetensors" in arena.refused_merge(shards)


@pytest.mark.parametrize(
    "name", ["rank_00.safetensors", "rank_01.safetensors", "manifest.json", "config.json"]
)
def test_a_missing_file(name, arena, shards):
    (shards / name).unlink()
    assert re.search(f"{name}|no weights", arena.refused_merge(shards))


@pytest.mark.parametrize("name", ["rank_01.safetensors", "manifest.json"])
def test_a_cut_file(name, arena, shards):
    path = shards / name
    path.write_bytes(path.read_bytes()[:-10])
    assert name in arena.refused_merge(shards)


def test_a_rank_of_another_model(arena, shards, zoo, tmp_path):
    other = zoo.make(tmp_path / "other", "gpt2", seed=1)
    split(other, tmp_path / "other-shards", 2)
    shutil.copy(tmp_path / "other-shards" / "rank_01.safetensors", shards)
    assert "rank_01.safetensors" in arena.refused_merge(shards)


@pytest.mark.parametrize("change", ["missing", "unknown", "another type", "another shape"])
def test_tensors_of_one_rank(change, arena, shards):
    path = shards / "rank_01.safetensors"
    tensors, name = load_file(path), "blocks.0.mlp.up.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        name = "blocks.0.mlp.sideways.weight"
        tensors[name] = torch.zeros(2)
    elif change == "another type":
        tensors[name] = tensors[name].view(torch.int32)
    else:
        tensors[name] = tensors[name].reshape(-1)
    save_file(tensors, path)
    refusal = arena.refused_merge(shards)
    assert name in refusal
    assert path.name in refusal


FORGERIES = {
    "another size": (lambda m: dataclasses.replace(m, tensor_parallel_size=3), "3|hashes"),
    "no size": (lambda m: dataclasses.replace(m, tensor_parallel_size=0), "tensor_parallel_size"),
    "astronomic size": (
        lambda m: dataclasses.replace(m, tensor_parallel_size=10**12),
        "tensor_parallel_size",
    ),
    "another vocabulary": (lambda m: dataclasses.replace(m, vocab_size=100), "100 tokens"),
    "another family": (lambda m: dataclasses.replace(m, model_type="bert"), "bert"),
    "tie to nothing": (lambda m: dataclasses.replace(m, ties={"a": "b"}), "ties a tensor to b"),
    "tie onto a tensor": (
        lambda m: dataclasses.replace(m, ties={"transformer.wpe.weight": "transformer.wte.weight"}),
        "would have the name",
    ),
    "unknown extras": (
        lambda m: dataclasses.replace(
            m, extras={"a": {"shape": (1,), "dtype": "float32", "sha256": "0"}}
        ),
        "extras.safetensors",
    ),
}


def forged_tensor(**changes):
    def forge(manifest):
        record = dataclasses.replace(manifest.tensors["blocks.0.mlp.up.weight"], **changes)
        return dataclasses.replace(
            manifest, tensors={**manifest.tensors, "blocks.0.mlp.up.weight": record}
        )

    return forge


FORGERIES |= {
    "another shape": (forged_tensor(shape=(24, 17)), "blocks.0.mlp.up.weight"),
    "another split": (forged_tensor(shard=None), "blocks.0.mlp.up.weight"),
    "name of another": (
        forged_tensor(stored=("transformer.wte.weight",)),
        "have the name transformer.wte.weight",
    ),
    "two names for one": (forged_tensor(stored=("a", "b")), "blocks.0.mlp.up.weight"),
    "hashes exchanged": (lambda m: swap_hashes(m), "damaged"),
}


def swap_hashes(manifest):
    first, second = manifest.tensors["blocks.0.mlp.up.weight"].sha256
    return forged_tensor(sha256=(second, first))(manifest)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest(forgery, arena, shards):
    """Its own hash is right, as whoever forges it would see to."""
    change, message = FORGERIES[forgery]
    manifest = change(Manifest.read(shards))
    (shards / "manifest.json").write_text(manifest.to_json())
    assert re.search(message, arena.refused_merge(shards))


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"format_version": 99}', '{"format_version": NaN}', "{" * 5000]
)
def test_a_wrong_manifest(content, arena, shards):
    (shards / "manifest.json").write_text(content)
    assert "manifest.json" in arena.refused_merge(shards)


def test_another_configuration(arena, shards):
    config = json.loads((shards / "config.json").read_text())
    (shards / "config.json").write_text(json.dumps({**config, "vocab_size": 102}))
    assert "101 tokens" in arena.refused_merge(shards)


def test_extra_tensors_are_hashed(arena, zoo):
    source = zoo.make(arena.folder / "hf", "gpt2")
    tensors = load_file(source / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, source / "model.safetensors")
    shards = arena.folder / "shards"
    split(source, shards, 2)
    flip(shards / "extras.safetensors", -1)
    refusal = arena.refused_merge(shards)
    assert "transformer.h.0.attn.bias" in refusal
    assert "damaged" in refusal


@pytest.fixture
def legacy(arena, zoo):
    """An original GLM in two mp_rank files."""
    source = zoo.make(arena.folder / "hf", "glm", vocabulary=102)
    split(source, arena.folder / "source", 2, style="legacy")
    return arena.folder / "source"


def resave(path, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


NORM = "transformer.final_layernorm.weight"


def nudge(state):
    state["module"][NORM][0] = 7


def lie_about_the_size(state):
    state["mp_world_size"] = 4


def widen(state):
    state["module"]["word_embeddings.weight"] = torch.zeros(52, 16)


def rename(state):
    state["module"]["transformer.final_layernorm.wait"] = state["module"].pop(NORM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nudge, f"{NORM}.*differs"),
        (lie_about_the_size, "written by 4 tensor-parallel ranks"),
        (widen, r"word_embeddings\.weight"),
        (rename, "final_layernorm"),
    ],
)
def test_mp_rank_files(change, message, arena, legacy):
    resave(legacy / "release" / "mp_rank_01_model_states.pt", change)
    assert re.search(message, arena.refused_merge(legacy))


def test_mp_rank_files_duplicated(arena, legacy):
    files = legacy / "release"
    shutil.copy(files / "mp_rank_00_model_states.pt", files / "mp_rank_01_model_states.pt")
    assert "repeats rank 0" in arena.refused_merge(legacy)


def test_an_mp_rank_file_missing(arena, legacy):
    files = legacy / "release"
    (files / "mp_rank_01_model_states.pt").rename(files / "mp_rank_02_model_states.pt")
    assert "numbered from 0 without gaps" in arena.refused_merge(legacy)


@pytest.mark.parametrize("tag", ["../release", "/", "..", "", "nothing"])
def test_a_hostile_tracker(tag, arena, legacy):
    (legacy / "latest").write_text(tag)
    assert "latest" in arena.refused_merge(legacy)


def test_legacy_files_without_a_vocabulary_that_divides(arena, zoo):
    source = zoo.make(arena.folder / "hf", "glm", vocabulary=101)
    refusal = arena.refused("split", source, arena.destination, "--tp", 2, "--to", "legacy")
    assert "word_embeddings.weight" in refusal
    assert "101" in refusal


def test_merging_leaves_the_shards_alone(arena, shards, file_tree):
    before = file_tree(shards)
    merge(shards, arena.destination)
    assert file_tree(shards) == before


def test_a_type_exchanged_in_all_ranks(arena, shards, rewrite_header):
    """The bytes and their hashes stay the same; only the manifest tells."""

    def exchange(header):
        header["final_norm.bias"]["dtype"] = "I32"

    for path in shards.glob("rank_*.safetensors"):
        rewrite_header(path, exchange)
    refusal = arena.refused_merge(shards)
    assert "final_norm.bias" in refusal
    assert "float32 in the manifest" in refusal
