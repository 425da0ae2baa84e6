"""Every door gives the same verdict about the same folder, and where it is accepted, the same tensors.

A case takes a good folder apart, or puts an odd one together. `ODD` folders are accepted, `HOSTILE` ones refused with
one `ValueError`; each visit is held to its time and memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoint_doors import COMMANDS, MOST_GROWTH, MOST_SECONDS, Visitor
from every_case import EVERY_CASE, by_turns
from safetensors.torch import load_file, save_file
from stored_models import Zoo, header_of, rewrite_header

from shardzoo import convert
from shardzoo.checkpoint.manifest import Manifest
from shardzoo.files.json_digest import add_digest
from shardzoo.files.strict_json import parse_json
from shardzoo.trainer.checkpointing.snapshot import STATE, TrainerState

LOADING = ("from_pretrained", "merge", "split", "verify", "command")
TEXT = (*LOADING, "generate", "finetune")  # of folders with a tokenizer
CONFIGURED = (*TEXT, "find_config", "estimate")
RESUMED = (*TEXT, "resume")

Case = tuple[str, Callable[[Path], object], tuple[str, ...]]  # base, what is done to it, doors


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Folders that are never written to."""
    root, zoo = tmp_path_factory.mktemp("bases"), Zoo()
    for variant in ("gpt2", "gpt2-untied", "bert", "t5", "t5-v1.1"):
        zoo.make(root / variant, variant)
    zoo.make(root / "glm", "glm", heads=2, head_size=64, vocabulary=104)
    _quiet_floats(root)
    for folder in root.iterdir():
        _add_tokenizer(folder)
    zoo.make(root / "sharded", "gpt2", vocabulary=400, sharded=True)
    _add_tokenizer(root / "sharded")
    convert.split(root / "gpt2", root / "shards", 2)
    _make_resumable(root / "shards")
    convert.split(_with_extra(root / "gpt2", root / "with-extra"), root / "shards-extra", 2)
    convert.split(root / "glm", root / "mp_rank", 2, style="legacy")
    return {folder.name: folder for folder in root.iterdir()}


def _quiet_floats(root: Path) -> None:
    """Random bits hold NaNs with payloads, which a door that casts could change; these are plain numbers."""
    for path in root.glob("*/*.safetensors"):
        seed = torch.Generator().manual_seed(len(str(path.parent.name)))
        tensors = {
            name: torch.randn(value.shape, generator=seed)
            for name, value in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


def _add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    (folder / "tokenizer.json").unlink(missing_ok=True)
    words = {f"w{number}": number for number in range(100)} | {"<unk>": 100}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        eos_token="w1",
    ).save_pretrained(folder)


def _make_resumable(folder: Path) -> None:
    import hashlib

    names = ("rank_00.safetensors", "rank_01.safetensors")
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    state = {
        **asdict(TrainerState(step=1, consumed_samples=1)),
        "files": digests,
    }  # as before there were versions
    (folder / STATE).write_text(json.dumps(add_digest(state)))


def _with_extra(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    edit_tensors(target, lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}))
    return target


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )


def add(
    name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]
) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(
        folder, lambda tensors: tensors.update({name: make(tensors)})
    )


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def copy(source: str, target: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / source, folder / target)


def move(source: str, target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / source).rename(folder / target)


def edit_config(**changes) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def as_bin(change=lambda tensors: tensors, **options) -> Callable[[Path], object]:
    """The weights as pytorch_model.bin, of what `change(tensors)` gives."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(change(tensors), folder / "pytorch_model.bin", **options)

    return write


WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
UP, NORM = "transformer.h.0.mlp.c_fc.weight", "transformer.ln_f.bias"
BERT_WTE, BERT_HEAD = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
T5_COPIES = (HEAD, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
MP_RANK = "release/mp_rank_{:02d}_model_states.pt"
OLD = {"_use_new_zipfile_serialization": False}


def wrapped(tensors):
    return {"module": tensors, "iteration": 3}


def two_bins(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {
        name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin"
        for number, name in enumerate(sorted(tensors))
    }
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def shared_table(tensors):
    return tensors["shared.weight"].clone()


def without_prefix(tensors) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def cast(dtype: torch.dtype, only: str = "") -> Callable[[Path], object]:
    return lambda folder: edit_tensors(
        folder,
        lambda t: t.update({name: value.to(dtype) for name, value in t.items() if only in name}),
    )


def hub_cache(folder: Path) -> None:
    """models--x/snapshots/HASH/FILE -> ../../blobs/SHA, as the hub's client lays it out; `folder` leads there."""
    root = folder.with_name(f"{folder.name}-cache") / "models--me--tiny"
    snapshot, blobs = root / "snapshots" / ("a" * 40), root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    folder.rmdir()
    folder.symlink_to(snapshot)


def link_within(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.data")
    (folder / "model.safetensors").symlink_to("weights.data")


def left_behind(folder: Path) -> None:
    """What trainers and downloads leave beside the weights."""
    (folder / "global_step1").mkdir()
    torch.save(
        {"module": {"other": torch.ones(2)}}, folder / "global_step1" / "mp_rank_00_model_states.pt"
    )
    (folder / "latest").write_text("global_step1")
    (folder / ".cache").mkdir()
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("x")
    (folder / "README.md").write_text("hello")


def padded_header(folder: Path) -> None:
    rewrite_header(
        folder / "model.safetensors",
        lambda h: json.dumps({**h, "__metadata__": {"von": "Jürgen ✓"}}).encode() + b" " * 13,
    )


def release(folder: Path) -> Path:
    return folder / "release"


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def flag_ai(ranks: bool, wrap: bool) -> Callable[[Path], object]:
    """FlagAI's files, whose config.json names no family."""

    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["model_type"]
        (folder / "config.json").write_text(json.dumps(config))
        if ranks:
            for rank in range(2):
                state = torch.load(folder / MP_RANK.format(rank), weights_only=True)
                torch.save(
                    state if wrap else state["module"], folder / f"pytorch_model_{rank:02d}.bin"
                )
            shutil.rmtree(release(folder))
            (folder / "latest").unlink()
        else:
            as_bin(
                lambda t: (
                    wrapped(t) if wrap else {f"glm.{name}": value for name, value in t.items()}
                )
            )(folder)

    return write


def old_ranks(folder: Path) -> None:
    for path in release(folder).iterdir():
        torch.save(torch.load(path, weights_only=True), path, **OLD)


ODD: dict[str, Case] = {
    "safetensors": ("gpt2", lambda folder: None, CONFIGURED),
    "several safetensors with an index": ("sharded", lambda folder: None, CONFIGURED),
    "bin": ("gpt2", as_bin(), TEXT),
    "bin with a transposed view": ("gpt2", as_bin(lambda t: t | {WTE: t[WTE].t().contiguous().t()}), TEXT),
    "several bins with an index": ("gpt2", two_bins, TEXT),
    "bin from before torch 1.6": ("gpt2", as_bin(**OLD), TEXT),
    "bin wrapped in module": ("gpt2", as_bin(wrapped), TEXT),
    "old bin wrapped in module": ("gpt2", as_bin(wrapped, **OLD), TEXT),
    "bin whose tensors share a storage": ("gpt2", as_bin(lambda t: t | {HEAD: t[WTE]}), TEXT),
    "names without a prefix": ("gpt2", lambda f: edit_tensors(f, without_prefix), TEXT),
    "mask buffers": ("gpt2", add("transformer.h.0.attn.bias", lambda t: torch.ones(1, 1, 8, 8).byte()), TEXT),
    "an ignored number": ("gpt2", add("transformer.h.0.attn.masked_bias", lambda t: torch.tensor(-1e4)), TEXT),
    "a stored copy of the tied head": ("gpt2", add(HEAD, lambda t: t[WTE].clone()), TEXT),
    "the tied head alone": ("gpt2", add(HEAD, lambda t: t.pop(WTE)), TEXT),
    "an untied head": ("gpt2-untied", lambda folder: None, CONFIGURED),
    "an untied head by its values alone": ("gpt2-untied", edit_config(tie_word_embeddings=True), TEXT),
    "an untied head by its last row": ("gpt2", add(HEAD, lambda t: t[WTE] + (torch.arange(101) == 100)[:, None]), TEXT),
    "bf16": ("gpt2", cast(torch.bfloat16), TEXT),
    "fp16": ("gpt2", cast(torch.float16), TEXT),
    "fp64": ("gpt2", cast(torch.float64), TEXT),
    "bf16 with fp32 norms": ("gpt2", cast(torch.bfloat16, "attn"), TEXT),
    "fp16 and bf16": ("gpt2", both(cast(torch.bfloat16, "attn"), cast(torch.float16, "mlp")), LOADING),
    "fp8 beside fp32": ("gpt2", cast(torch.float8_e4m3fn, "c_proj"), LOADING),
    "T5 v1.0": ("t5", lambda folder: None, LOADING),
    "T5 v1.1": ("t5-v1.1", lambda folder: None, LOADING),
    "T5 v1.1 with today's flag": ("t5-v1.1", edit_config(tie_word_embeddings=True, transformers_version="5"), LOADING),
    "T5 of transformers 4": ("t5-v1.1", edit_config(tie_word_embeddings=False, transformers_version="4.40.0"), LOADING),
    "T5 with all its copies": ("t5", both(*(add(name, shared_table) for name in T5_COPIES)), LOADING),
    "BERT with its tied copy": ("bert", add(BERT_HEAD, lambda t: t[BERT_WTE].clone()), LOADING),
    "BERT with another head": ("bert", add(BERT_HEAD, lambda t: t[BERT_WTE] + 1), LOADING),
    "BERT with another type in its head": ("bert", add(BERT_HEAD, lambda t: t[BERT_WTE].double()), LOADING),
    "stacked tensors of two types": ("bert", cast(torch.float16, "attention.self.key.weight"), LOADING),
    "a snapshot of the hub's cache": ("gpt2", hub_cache, CONFIGURED),
    "a link within the folder": ("gpt2", link_within, TEXT),
    "leftovers": ("gpt2", left_behind, TEXT),
    "a padded header with metadata": ("gpt2", padded_header, TEXT),
    "an empty tensor beside": ("gpt2", add("transformer.h.1.attn.bias", lambda t: torch.zeros(0, 3)), TEXT),
    "unknown keys in config.json": ("gpt2", edit_config(my_key=[1], resid_pdrop=0.0), CONFIGURED),
    "mp_rank files": ("mp_rank", lambda folder: None, LOADING),
    "mp_rank files without a config": ("mp_rank", without_config, LOADING),
    "mp_rank files from before torch 1.6": ("mp_rank", old_ranks, LOADING),
    "the folder of mp_rank files": ("mp_rank", copy("config.json", "release/config.json"), LOADING),
    "FlagAI's bin": ("glm", flag_ai(False, False), (*LOADING, "find_config", "estimate")),
    "FlagAI's bin wrapped in module": ("glm", flag_ai(False, True), LOADING),
    "FlagAI's bins of two ranks": ("mp_rank", flag_ai(True, False), LOADING),
    "FlagAI's bins of two ranks wrapped in module": ("mp_rank", flag_ai(True, True), LOADING),
    "shards": ("shards", lambda folder: None, RESUMED),
    "shards with extras": ("shards-extra", lambda folder: None, TEXT),
}  # fmt: skip


def put(name: str, kind: str) -> Callable[[Path], object]:
    """Something that is no file of the folder in the place of `name`."""

    def replace(folder: Path) -> None:
        path, outside = folder / name, folder.with_name(f"{folder.name}-outside")
        shutil.move(path, outside)
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "empty":
                path.touch()
            case "device":
                path.symlink_to("/dev/zero")
            case "link out":
                path.symlink_to(outside)
            case "link loop":
                path.symlink_to(name)
            case "dangling link":
                path.symlink_to("nothing")
            case "missing":
                pass

    return replace


KINDS = ("fifo", "folder", "empty", "device", "link out", "link loop", "dangling link", "missing")


def cut(name: str, count: int = 10) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def append(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"more")


def header(change) -> Callable[[Path], object]:
    return lambda folder: rewrite_header(folder / "model.safetensors", change)


def set_entry(**changes):
    return lambda h: h["transformer.ln_f.bias"].update(changes)


def huge_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    text = b'{"a":' + b"[[]," * (5 << 20) + b"0" + b"]" * (5 << 20) + b"}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def rezip(change) -> Callable[[Path], object]:
    """The bin with the records that `change(name, content)` gives, and their method of compression."""

    def write(folder: Path) -> None:
        as_bin()(folder)
        path = folder / "pytorch_model.bin"
        with zipfile.ZipFile(path) as source:
            records = [(info.filename, source.read(info)) for info in source.infolist()]
        with zipfile.ZipFile(path, "w") as target:
            for name, content in records:
                content, method = change(name, content)
                target.writestr(zipfile.ZipInfo(name), content, compress_type=method)

    return write


def shorten(name, content):
    return content[:16] if re.search(r"/data/\d+$", name) else content, zipfile.ZIP_STORED


def compress(name, content):
    return content, zipfile.ZIP_DEFLATED


def big_endian(name, content):
    return b"big" if name.endswith("byteorder") else content, zipfile.ZIP_STORED


def twice(h):
    return json.dumps(h).replace('{"', f'{{"{NORM}": {json.dumps(h[NORM])}, "', 1).encode()


def key_twice(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"n_embd": 16,', 1))


def nudge(state):
    state["module"]["transformer.final_layernorm.weight"].add_(1)


def widen(state):
    state["module"]["word_embeddings.weight"] = torch.ones(53, 128)


class Calls:
    def __reduce__(self):
        return os.system, ("touch /tmp/shardzoo-was-here",)


def flip(name: str, tensor: str, place: float = 0.5) -> Callable[[Path], object]:
    """One bit of a tensor."""

    def change(folder: Path) -> None:
        start, entries = header_of(folder / name)
        first, last = entries[tensor]["data_offsets"]
        content = bytearray((folder / name).read_bytes())
        content[start + first + int((last - first - 1) * place)] ^= 4
        (folder / name).write_bytes(content)

    return change


def forge(change) -> Callable[[Path], object]:
    """A manifest whose own digest is right, as whoever forges it would see to."""
    import dataclasses

    def write_forged(folder: Path) -> None:
        found = Manifest.read(folder)
        (folder / "manifest.json").write_text(dataclasses.replace(found, **change(found)).to_json())

    return write_forged


def wrong_digest(found: Manifest) -> dict:
    import dataclasses

    name = "blocks.0.mlp.up.weight"
    record = dataclasses.replace(
        found.tensors[name], sha256=("0" * 64, found.tensors[name].sha256[1])
    )
    return {"tensors": {**found.tensors, name: record}}


def edit_manifest(**changes) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def resave(rank: int, change) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = folder / MP_RANK.format(rank)
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return write


def swap_ranks(folder: Path) -> None:
    (folder / "rank_00.safetensors").rename(folder / "x")
    (folder / "rank_01.safetensors").rename(folder / "rank_00.safetensors")
    (folder / "x").rename(folder / "rank_01.safetensors")


def unlist(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["transformer.ln_f.weight"]
    path.write_text(json.dumps(index))


def list_as(file: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["transformer.ln_f.weight"] = file
        path.write_text(json.dumps(index))

    return edit


HOSTILE: dict[str, Case] = {
    **{f"config.json: {kind}": ("gpt2", put("config.json", kind), CONFIGURED) for kind in KINDS},
    **{f"weights: {kind}": ("gpt2", put("model.safetensors", kind), TEXT) for kind in KINDS},
    **{f"bin: {kind}": ("gpt2", both(as_bin(), put("pytorch_model.bin", kind)), TEXT) for kind in KINDS},
    **{f"manifest: {kind}": ("shards", put("manifest.json", kind), RESUMED) for kind in KINDS},
    **{f"rank file: {kind}": ("shards", put("rank_01.safetensors", kind), RESUMED) for kind in KINDS},
    **{f"mp_rank file: {kind}": ("mp_rank", put(MP_RANK.format(1), kind), LOADING) for kind in KINDS},
    "config.json: a key twice": ("gpt2", key_twice, CONFIGURED),
    "config.json: NaN": ("gpt2", edit_config(layer_norm_epsilon=float("nan")), CONFIGURED),
    "config.json: Infinity": ("gpt2", edit_config(layer_norm_epsilon=float("inf")), CONFIGURED),
    "config.json: a list": ("gpt2", write("config.json", "[]"), CONFIGURED),
    "config.json: half of it": ("gpt2", write("config.json", '{"model_type": "gpt2", '), CONFIGURED),
    "config.json: no UTF-8": ("gpt2", write("config.json", b"\xff\xfe"), CONFIGURED),
    "config.json: nested": ("gpt2", write("config.json", '{"a": ' + "[" * 200000 + "]" * 200000 + "}"), CONFIGURED),
    "config.json: huge": ("gpt2", write("config.json", '{"a": [' + "0," * (9 << 20) + "0]}"), CONFIGURED),
    "config.json: no family": ("gpt2", write("config.json", "{}"), CONFIGURED),
    "config.json: unknown family": ("gpt2", edit_config(model_type="gpt7"), TEXT),
    "config.json: family of a list": ("gpt2", edit_config(model_type=["gpt2"]), CONFIGURED),
    "config.json: another family": ("gpt2", edit_config(model_type="bert"), LOADING),
    "n_layer=10**7": ("gpt2", edit_config(n_layer=10**7), CONFIGURED),
    "n_layer of text": ("gpt2", edit_config(n_layer="2"), CONFIGURED),
    "n_layer=0": ("gpt2", edit_config(n_layer=0), CONFIGURED),
    "n_layer too many": ("gpt2", edit_config(n_layer=3), TEXT),
    "n_layer too few": ("gpt2", edit_config(n_layer=1), TEXT),
    "n_embd=10**12": ("gpt2", edit_config(n_embd=10**12), CONFIGURED),
    "n_embd of null": ("gpt2", edit_config(n_embd=None), CONFIGURED),
    "n_inner=-1": ("gpt2", edit_config(n_inner=-1), CONFIGURED),
    "vocab_size of a fraction": ("gpt2", edit_config(vocab_size=101.5), CONFIGURED),
    "vocab_size too large": ("gpt2", edit_config(vocab_size=102), TEXT),
    "num_decoder_layers=10**7": ("t5", edit_config(num_decoder_layers=10**7), (*LOADING, "find_config")),
    "weights: cut": ("gpt2", cut("model.safetensors"), TEXT),
    "weights: bytes behind": ("gpt2", append("model.safetensors"), TEXT),
    "weights: a huge header": ("gpt2", huge_header, TEXT),
    "weights: a header of 2**60 bytes": ("gpt2", write("model.safetensors", bytes(7) + b"\x10{}{}"), TEXT),
    "weights: a header that is no JSON": ("gpt2", header(lambda h: b"{nonsense}"), TEXT),
    "weights: unknown type": ("gpt2", header(set_entry(dtype="F31")), TEXT),
    "weights: overlapping tensors": ("gpt2", header(set_entry(data_offsets=[0, 64])), TEXT),
    "weights: a shape of more bytes": ("gpt2", header(set_entry(shape=[17])), TEXT),
    "weights: a negative shape": ("gpt2", header(set_entry(shape=[-16])), TEXT),
    "weights: a shape of fractions": ("gpt2", header(set_entry(shape=[16.0])), TEXT),
    "weights: another type of as many bytes": ("gpt2", header(set_entry(dtype="I32")), TEXT),
    "weights: a tensor twice": ("gpt2", header(twice), TEXT),
    "weights: a tensor missing": ("gpt2", lambda f: edit_tensors(f, lambda t: t.pop(NORM)), TEXT),
    "weights: an unknown tensor": ("gpt2", add("more", lambda t: torch.ones(2)), TEXT),
    "weights: a transposed tensor": ("gpt2", add(UP, lambda t: t[UP].t()), TEXT),
    "weights: integers": ("gpt2", add(NORM, lambda t: torch.ones(16, dtype=torch.int8)), TEXT),
    "weights: a copy that differs": (
        "t5", add("encoder.embed_tokens.weight", lambda t: t["shared.weight"] + 1), LOADING
    ),
    "weights: no head where one is announced": ("gpt2", edit_config(tie_word_embeddings=False), TEXT),
    "index: a path upwards": ("sharded", list_as("../model.safetensors"), TEXT),
    "index: a file that is not there": ("sharded", list_as("none.safetensors"), TEXT),
    "index: the folder": ("sharded", list_as("."), TEXT),
    "index: a tensor left out": ("sharded", unlist, TEXT),
    "index: numbers": ("sharded", write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), TEXT),
    "bin: records shorter than claimed": ("gpt2", rezip(shorten), TEXT),
    "bin: compressed": ("gpt2", rezip(compress), TEXT),
    "bin: big-endian": ("gpt2", rezip(big_endian), TEXT),
    "bin: cut": ("gpt2", both(as_bin(), cut("pytorch_model.bin", 5000)), TEXT),
    "bin: bytes behind": ("gpt2", both(as_bin(), append("pytorch_model.bin")), TEXT),
    "bin: code": ("gpt2", as_bin(lambda t: t | {NORM: Calls()}), TEXT),
    "bin: code beside": ("gpt2", as_bin(lambda t: {"module": t, "state": Calls()}), TEXT),
    "bin: old, with code": ("gpt2", as_bin(lambda t: t | {NORM: Calls()}, **OLD), TEXT),
    "bin: old, cut": ("gpt2", both(as_bin(**OLD), cut("pytorch_model.bin")), TEXT),
    "bin: old, bytes behind": ("gpt2", both(as_bin(**OLD), append("pytorch_model.bin")), TEXT),
    "bin: a list": ("gpt2", as_bin(lambda t: list(t.values())), TEXT),
    "bin: numbers beside tensors": ("gpt2", as_bin(lambda t: t | {"step": 3}), TEXT),
    "bin: sparse": ("gpt2", as_bin(lambda t: t | {WTE: t[WTE].to_sparse()}), TEXT),
    "bin: a bare pickle": ("gpt2", both(as_bin(), write("pytorch_model.bin", b"\x80\x02}q\x00.")), TEXT),
    "shards: a bit of rank 0": ("shards", flip("rank_00.safetensors", "blocks.1.mlp.down.weight"), RESUMED),
    "shards: a bit of rank 1": ("shards", flip("rank_01.safetensors", "word_embeddings.weight", 0.1), RESUMED),
    "shards: a bit of a replicated copy": ("shards", flip("rank_01.safetensors", "final_norm.bias"), RESUMED),
    "shards: a bit of the padding": ("shards", flip("rank_01.safetensors", "word_embeddings.weight", 1.0), RESUMED),
    "shards: a bit of the extras": ("shards-extra", flip("extras.safetensors", "transformer.h.0.attn.bias"), TEXT),
    "shards: ranks swapped": ("shards", swap_ranks, RESUMED),
    "shards: a rank twice": ("shards", copy("rank_00.safetensors", "rank_01.safetensors"), RESUMED),
    "shards: another version": ("shards", edit_manifest(format_version=99), RESUMED),
    "shards: an edited manifest": ("shards", edit_manifest(vocab_size=100), RESUMED),
    "shards: a manifest without digest": ("shards", write("manifest.json", '{"format_version": 1}'), RESUMED),
    "shards: a manifest of too many ranks": ("shards", forge(lambda found: {"tensor_parallel_size": 10**12}), RESUMED),
    "shards: a manifest of another size": ("shards", forge(lambda found: {"tensor_parallel_size": 3}), RESUMED),
    "shards: a manifest with wrong digests": ("shards", forge(wrong_digest), TEXT),
    "shards: a manifest with ties of a list": ("shards", forge(lambda found: {"ties": ["a"]}), TEXT),
    "shards: a manifest of another family": ("shards", forge(lambda found: {"model_type": "bert"}), TEXT),
    "shards: another vocabulary": ("shards", edit_config(vocab_size=102), RESUMED),
    "mp_rank: a rank missing": ("mp_rank", move(MP_RANK.format(1), MP_RANK.format(2)), LOADING),
    "mp_rank: a rank twice": ("mp_rank", copy(MP_RANK.format(0), MP_RANK.format(1)), LOADING),
    "mp_rank: written by more ranks": ("mp_rank", resave(1, lambda s: s.update(mp_world_size=4)), LOADING),
    "mp_rank: copies that differ": ("mp_rank", resave(1, nudge), LOADING),
    "mp_rank: a tensor too long": ("mp_rank", resave(1, widen), LOADING),
    "mp_rank: code beside": ("mp_rank", resave(0, lambda s: s.update(state=Calls())), LOADING),
    "mp_rank: a tracker that leads out": ("mp_rank", write("latest", "../gpt2"), LOADING),
    "mp_rank: a tracker of /dev/zero": ("mp_rank", put("latest", "device"), LOADING),
    "no weights at all": ("gpt2", lambda folder: (folder / "model.safetensors").unlink(), TEXT),
    "no shards but rank files": ("shards", lambda f: (f / "manifest.json").unlink(), RESUMED),
}  # fmt: skip


# Every day, a command visits some folders; with `make test-all` all commands visit all.
COMMANDS_BY_CASE = {
    name: (list(COMMANDS)[number % 3],) for number, name in enumerate(list(HOSTILE)[::9])
}


@pytest.fixture(scope="module")
def visitor():
    visitor = Visitor()
    yield visitor
    visitor.close()


@pytest.fixture
def prepared(tmp_path, bases):
    def prepare(case: Case) -> Path:
        base, change, _ = case
        folder = tmp_path / "model"
        shutil.copytree(bases[base], folder)
        change(folder)
        return folder

    return prepare


def visits(visitor: Visitor, folder: Path, doors: tuple[str, ...], warm: Path):
    """What happens at each door; the first visit of all, to a good folder, imports what the door needs."""
    found = {}
    for door in doors:
        if door not in visitor.__dict__.setdefault("warmed", set()):
            visitor.visit(door, warm, seconds=120)
            visitor.warmed.add(door)
        found[door] = visitor.visit(door, folder)
        assert not found[door].crash, f"{door}: {found[door].crash}"
        assert found[door].seconds < MOST_SECONDS, f"{door} took {found[door].seconds:.1f} s"
        assert found[door].growth < MOST_GROWTH, f"{door} grew by {found[door].growth >> 20} MiB"
    return found


@pytest.mark.parametrize("name", by_turns(ODD, 8))
def test_odd_folders_are_accepted_with_the_same_tensors(name, visitor, prepared, bases):
    found = visits(visitor, prepared(ODD[name]), ODD[name][2], bases["shards"])
    assert {door: visit.message for door, visit in found.items() if not visit.accepted} == {}
    assert len({visit.tensors for visit in found.values() if visit.tensors}) == 1


@pytest.mark.parametrize("name", by_turns(HOSTILE, 4))
def test_hostile_folders_are_refused(name, visitor, prepared, bases):
    commands = tuple(COMMANDS) if EVERY_CASE else COMMANDS_BY_CASE.get(name, ())
    found = visits(visitor, prepared(HOSTILE[name]), HOSTILE[name][2] + commands, bases["shards"])
    assert [door for door, visit in found.items() if visit.accepted] == []
    assert not Path("/tmp/shardzoo-was-here").exists()


@pytest.mark.parametrize("door", COMMANDS)
def test_a_command_accepts_a_good_folder(door, visitor, bases):
    """So that what it refuses is refused for what was done to it."""
    visit = visitor.visit(door, bases["gpt2"], seconds=120)
    assert visit.accepted, visit


def test_the_same_model_in_every_format_has_the_same_tensors(visitor, prepared, tmp_path, bases):
    same = [
        name
        for name, (base, _, _) in ODD.items()
        if base == "gpt2" and not re.search("bf16|fp|untied|cache", name)
    ]
    digests = {}
    for name in same:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        digests[name] = visits(visitor, prepared(ODD[name]), ("from_pretrained",), bases["shards"])[
            "from_pretrained"
        ].tensors
    digests["shards"] = visitor.visit("from_pretrained", bases["shards"]).tensors
    assert len(set(digests.values())) == 1, digests


def test_there_are_enough_cases():
    assert len(ODD) + len(HOSTILE) >= 60


@pytest.mark.parametrize("number", ["1e999", "-1e400", "NaN", "-Infinity"])
def test_json_of_a_folder_has_finite_numbers_only(number):
    text = f'{{"layer_norm_eps": {number}}}'.encode()
    with pytest.raises(ValueError, match=r"too large for a number|is not a JSON number"):
        parse_json(text, "config.json")
    assert not math.isfinite(parse_json(text, "state", finite=False)["layer_norm_eps"])
