"""Hostile Hugging Face folders: wrong indices, configurations and links."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def sharded(zoo, tmp_path_factory):
    """A GPT-2 in several files with an index."""
    return zoo.make(tmp_path_factory.mktemp("sharded") / "hf", "gpt2", vocabulary=400, sharded=True)


def edit(path, change) -> None:
    content = json.loads(path.read_text())
    replaced = change(content)
    path.write_text(json.dumps(content if replaced is None else replaced))


def put_into(name):
    def change(index):
        index["weight_map"]["transformer.ln_f.weight"] = name

    return change


def swap_files(index):
    names = index["weight_map"]
    first = names["transformer.wte.weight"]
    names["transformer.wte.weight"] = next(name for name in names.values() if name != first)


def unlist(index):
    del index["weight_map"]["transformer.ln_f.weight"]


def invent(index):
    index["weight_map"]["transformer.h.7.ln_1.weight"] = index["weight_map"][
        "transformer.ln_f.weight"
    ]


INDICES = {
    "path upwards": (put_into("../evil.safetensors"), "its own folder"),
    "absolute path": (put_into("/etc/evil.safetensors"), "its own folder"),
    "the folder itself": (put_into("."), "not a .safetensors file|own folder"),
    "empty name": (put_into(""), "not a .safetensors file|own folder"),
    "name with a zero byte": (put_into("a\0.safetensors"), "its own folder"),
    "missing file": (put_into("none.safetensors"), "cannot read.*none.safetensors"),
    "file of another kind": (put_into("tokenizer.json"), "not a .safetensors file"),
    "tensor in another file": (swap_files, r"wte\.weight.* does not have it"),
    "tensor that is nowhere": (invent, r"h\.7\.ln_1\.weight.*does not have it"),
    "tensor left out": (unlist, r"ln_f\.weight.*not listed"),
    "no weight map": (lambda index: {"metadata": {}}, "must have a weight_map"),
    "weight map of numbers": (lambda index: {"weight_map": {"a": 1}}, "must have a weight_map"),
    "list": (lambda index: [1], "must hold a JSON object"),
}


@pytest.mark.parametrize("wrong", INDICES)
def test_a_wrong_index(wrong, arena, sharded):
    change, message = INDICES[wrong]
    source = arena.copy(sharded)
    edit(source / "model.safetensors.index.json", change)
    assert re.search(message, arena.refused_split(source))


def test_a_tensor_in_two_files(arena, sharded):
    source = arena.copy(sharded)
    first, second = sorted(source.glob("model-*.safetensors"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor}, second, metadata={"format": "pt"})
    refusal = arena.refused_split(source)
    assert name in refusal
    assert first.name in refusal


def set_config(**changes):
    return lambda config: {**config, **changes}


CONFIGS = {
    "unknown family": (set_config(model_type="gpt7"), "gpt7"),
    "no family": (lambda config: {}, "model_type"),
    "family of another": (set_config(model_type="bert"), "BertForMaskedLM"),
    "a billion layers": (set_config(n_layer=10**9), "n_layer .*1000000000"),
    "one layer too few": (set_config(n_layer=1), r"h\.1\.|layers"),
    "one layer too many": (set_config(n_layer=3), r"lacks transformer\.h\.2\."),
    "no layers": (set_config(n_layer=0), "n_layer|layers"),
    "layers as text": (set_config(n_layer="2"), "config.json"),
    "hidden size as text": (set_config(n_embd="16"), "config.json"),
    "hidden size of null": (set_config(n_embd=None), "config.json"),
    "negative hidden size": (set_config(n_embd=-16), "n_embd"),
    "astronomic hidden size": (set_config(n_embd=1 << 62), "config.json|shape|lacks"),
    "no heads": (set_config(n_head=0), "n_head"),
    "larger vocabulary": (set_config(vocab_size=102), r"wte\.weight.*\[101, 16\]"),
    "smaller vocabulary": (set_config(vocab_size=100), r"wte\.weight.*\[101, 16\]"),
    "list": (lambda config: [config], "must hold a JSON object"),
}


@pytest.mark.parametrize("wrong", CONFIGS)
def test_a_wrong_configuration(wrong, arena, gpt2_folder):
    change, message = CONFIGS[wrong]
    source = arena.copy(gpt2_folder)
    edit(source / "config.json", change)
    assert re.search(message, arena.refused_split(source))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"n_embd": 16, "n_embd": 17}', "twice"),
        (b"\xff", "valid JSON"),
    ],
)
def test_a_damaged_configuration(content, message, arena, gpt2_folder):
    source = arena.copy(gpt2_folder)
    (source / "config.json").write_bytes(content)
    assert message in arena.refused_split(source)


def test_no_configuration(arena, gpt2_folder):
    source = arena.copy(gpt2_folder)
    (source / "config.json").unlink()
    assert "no config.json" in arena.refused_split(source)


def test_more_ranks_than_heads(arena, gpt2_folder):
    refusal = arena.refused_split(gpt2_folder, 5)
    assert re.search(r"blocks\.0\.attention\.qkv\.weight.*5 ways; use 1 to 4 ranks", refusal)


@pytest.mark.parametrize("style", ["legacy", "megatron"])
def test_formats_of_equal_parts_refuse_unequal_ones(style, arena, gpt2_folder):
    refusal = arena.refused("split", gpt2_folder, arena.destination, "--tp=3", f"--to={style}")
    assert re.search(r"parameter blocks\.0\.attention\.qkv.*3 ways evenly; use 1, 2 or 4", refusal)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_none(size, arena, gpt2_folder):
    assert "must be at least 1" in arena.refused(
        "split", gpt2_folder, arena.destination, f"--tp={size}"
    )


@pytest.mark.parametrize("change", ["missing", "unknown", "transposed"])
def test_tensors_that_do_not_fit(change, arena, gpt2_folder):
    source = arena.copy(gpt2_folder)
    tensors = load_file(source / "model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors[name.replace("c_attn", "c_else")] = tensors[name].clone()
    else:
        tensors[name] = tensors[name].t().contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert (
        name.replace("c_attn", "c_else") if change == "unknown" else name
    ) in arena.refused_split(source)


def test_a_tied_copy_that_differs(arena, zoo):
    source = zoo.make(arena.folder / "bert", "bert")
    tensors = load_file(source / "model.safetensors")
    copy = tensors["bert.embeddings.word_embeddings.weight"].clone()
    copy[-1, -1] = 7
    tensors["cls.predictions.decoder.weight"] = copy
    save_file(tensors, source / "model.safetensors")
    merged = arena.converted(source)
    for name in ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"):
        torch.testing.assert_close(merged[name], tensors[name], rtol=0, atol=0, equal_nan=True)


def test_stacked_tensors_of_two_types(arena, zoo):
    source = zoo.make(arena.folder / "bert", "bert")
    tensors = load_file(source / "model.safetensors")
    name = "bert.encoder.layer.0.attention.self.key.weight"
    tensors[name] = tensors[name].half()
    save_file(tensors, source / "model.safetensors")
    merged = arena.converted(source)
    for other in ("key", "query"):
        stacked = name.replace("key", other)
        torch.testing.assert_close(
            merged[stacked], tensors[stacked].float(), rtol=0, atol=0, equal_nan=True
        )


# A folder beside the weights is no file to take along, and is left alone.
STRANGE = [
    (name, kind)
    for name in ("model.safetensors", "config.json", "tokenizer.json")
    for kind in ("link out", "link loop", "dangling link", "pipe", "device", "folder")
    if (name, kind) != ("tokenizer.json", "folder")
]


@pytest.mark.parametrize(("name", "kind"), STRANGE)
def test_files_that_are_none(name, kind, arena, gpt2_folder):
    source = arena.copy(gpt2_folder)
    outside = arena.folder / "outside"
    shutil.move(source / name, outside)
    path = source / name
    if kind == "link out":
        path.symlink_to(outside)
    elif kind == "link loop":
        path.symlink_to(name)
    elif kind == "dangling link":
        path.symlink_to("nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    outside.touch()
    code, message = arena.convert("split", source, arena.destination, "--tp", 2)
    assert code == 2, message
    assert not arena.destination.exists()
    assert not list(arena.folder.glob(".*"))


def test_a_link_within_the_hub_cache_is_followed(arena, gpt2_folder, hashes):
    """Snapshots of the Hugging Face cache are links into its blobs."""
    snapshot, blobs = arena.folder / "repo" / "snapshots" / "abc", arena.folder / "repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in gpt2_folder.iterdir():
        shutil.copy(path, blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    assert arena.convert("merge", snapshot, arena.destination) == (0, "")
    assert hashes(arena.destination) == hashes(gpt2_folder)
    assert not (arena.destination / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("what", ["missing", "empty", "a file"])
def test_no_folder_of_weights(what, arena):
    source = arena.folder / "source"
    if what == "empty":
        source.mkdir()
    elif what == "a file":
        source.write_text("weights")
    assert str(source) in arena.refused_split(source).replace("\n", "")
