"""Hostile folders of torch.distributed.checkpoint: code and lies in .metadata, chunks that lie, links."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from shardzoo.convert.operations import Options, merge

NAME = "transformer.h.1.mlp.c_fc.weight"


class Calls:
    """Unpickling this calls a function."""

    def __init__(self, function, *arguments) -> None:
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.fixture(scope="module")
def dcp_folder(gpt2_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "dcp"
    merge(gpt2_folder, folder, Options(largest_file=8_000), style="dcp")
    assert len(list(folder.glob("*.distcp"))) > 1
    return folder


def edit(source, change) -> None:
    """Changes the Metadata, or replaces it by what `change` returns."""
    path = source / ".metadata"
    found = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(found) or found))


def entry(change):
    """Changes the TensorStorageMetadata of a tensor."""
    return lambda found: change(found.state_dict_metadata[NAME])


def place(**changes):
    """Changes where a tensor is."""

    def change(found):
        (key,) = (index for index in found.storage_data if index.fqn == NAME)
        found.storage_data[key] = replace(found.storage_data[key], **changes)

    return change


def chunk(offsets, sizes):
    return metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def chunks(*found):
    def change(tensor):
        tensor.chunks = list(found)

    return entry(change)


def set_size(*size):
    def change(tensor):
        tensor.size = torch.Size(size)

    return entry(change)


def set_type(dtype):
    def change(tensor):
        tensor.properties.dtype = dtype

    return entry(change)


def forget(found):
    found.storage_data = {
        index: at for index, at in found.storage_data.items() if index.fqn != NAME
    }


def swap(found):
    """Two tensors of equal shapes at each other's place are not noticed; these have different ones."""
    other = next(index for index in found.storage_data if index.fqn == "transformer.wte.weight")
    (key,) = (index for index in found.storage_data if index.fqn == NAME)
    places = found.storage_data
    places[key], places[other] = places[other], places[key]


LIES = {
    "a larger tensor": (set_size(16, 99), "do not have its 1,584 elements"),
    "a huge tensor": (set_size(1 << 40, 24), "do not have its"),
    "a tensor of 2^62 rows": (set_size(1 << 62, 24), "has the shape"),
    "one dimension": (set_size(384), "the chunk at"),
    "a negative dimension": (lambda f: f.state_dict_metadata.update({NAME: negative()}), "has the shape"),
    "a chunk outside": (chunks(chunk([8, 0], [16, 24])), r"chunk at \[8, 0\] of \[16, 24\] is outside"),
    "a chunk twice": (chunks(chunk([0, 0], [16, 24]), chunk([0, 0], [16, 24])), "do not have its 384 elements"),
    "overlapping chunks": (chunks(chunk([0, 0], [8, 24]), chunk([4, 0], [8, 24])), "does not place|according to"),
    "no chunks": (chunks(), "no type or no chunks"),
    "a chunk of another size": (chunks(chunk([0, 0], [4, 24])), "according to .metadata"),
    "another type": (set_type(torch.float16), r"is F32 .* but F16 .* according to .metadata"),
    "a complex type": (set_type(torch.complex128), "element type complex128 cannot be stored"),
    "no place": (forget, "does not place the chunk"),
    "each other's place": (swap, "according to .metadata"),
    "no storage data": (lambda f: setattr(f, "storage_data", None), "must have state_dict_metadata and storage_data"),
    "no tensors": (lambda f: f.state_dict_metadata.clear(), "lists no tensors"),
    "a path upwards": (place(relative_path="../evil.distcp"), "its own folder"),
    "an absolute path": (place(relative_path="/etc/evil.distcp"), "its own folder"),
    "a number as path": (place(relative_path=7), "does not say where"),
    "another kind of file": (place(relative_path="config.json"), "not a .distcp file"),
    "a missing file": (place(relative_path="__9_9.distcp"), "cannot read"),
    "a negative offset": (place(offset=-1), "does not say where"),
    "an offset behind the end": (place(offset=1 << 50), "distcp"),
    "an offset in the middle": (place(offset=17), "distcp"),
    "a short length": (place(length=100), "distcp"),
    "no length": (place(length=0), "distcp"),
    "a huge length": (place(length=1 << 60), "distcp"),
    "a compressed chunk": (place(transform_descriptors=["zstd"]), r"is stored with \['zstd'\]"),
    "an unknown tensor": (
        lambda f: f.state_dict_metadata.update({"extra": f.state_dict_metadata[NAME]}), "does not place the chunk"
    ),
    "a dictionary": (lambda f: {"state_dict_metadata": {}}, "holds no Metadata"),
    "another class": (lambda f: metadata.StorageMeta(), "holds no Metadata|refused"),
    "entries of another class": (lambda f: f.state_dict_metadata.update({NAME: 3}), "must list entries by name"),
}  # fmt: skip


def negative():
    size = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([16, 24]), [])
    size.size = Calls(torch.Size, (-16, 24))
    return size


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies(lie, arena, dcp_folder):
    change, message = LIES[lie]
    source = arena.copy(dcp_folder)
    edit(source, change)
    refusal = arena.refused_merge(source)
    assert re.search(message, refusal), refusal
    assert refusal.count("\n") == 1


def bombs(marker):
    return {
        "os.system": (Calls(os.system, f"touch {marker}"), "it holds a posix.system"),
        "eval": (Calls(eval, f"open({str(marker)!r}, 'w')"), "it holds a builtins.eval"),
        "getattr": (Calls(getattr, "text", "upper"), "it holds a builtins.getattr"),
        "torch.load": (Calls(torch.load, str(marker)), "it holds a torch.serialization.load"),
        "a bytearray": (Calls(bytearray, 3 << 30), "it holds a builtins.bytearray"),
        "a class of numpy": (torch.zeros(2).numpy(), "it holds a numpy"),
        "bytes": (b"\0" * 9, "opcode SHORT_BINBYTES|it holds a"),
        "a pair as key": ({(1, 2): 3}, "has a tuple as key"),
        "a set": ({1, 2}, "opcode EMPTY_SET"),
    }


@pytest.mark.parametrize("name", [
    "os.system", "eval", "getattr", "torch.load", "a bytearray", "a class of numpy", "bytes", "a pair as key", "a set",
])  # fmt: skip
@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "alone"])
def test_code_in_metadata_is_refused_and_not_run(name, where, arena, dcp_folder):
    marker = arena.folder / "executed"
    bomb, message = bombs(marker)[name]
    source = arena.copy(dcp_folder)
    if where == "alone":
        (source / ".metadata").write_bytes(pickle.dumps(bomb))
    else:
        path = source / ".metadata"
        found = pickle.loads(path.read_bytes())
        setattr(found, where, bomb)
        path.write_bytes(pickle.dumps(found))
    assert re.search(message, arena.refused_merge(source))
    assert not marker.exists()


# A pair of the same pair of the same pair …: hashing it, or its text, takes 2^60 steps.
PAIRS = b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60))
DEEP = b"\x80\x04}" + PAIRS + b"K\1s."
RAW = {
    "empty": b"",
    "no pickle": b"PK\3\4 and so on",
    "cut": b"\x80\x04\x95\xff\0\0\0\0\0\0\0",
    "no end": b"\x80\x04N",
    "nothing on the stack": b"\x80\x04.",
    "a mark too few": b"\x80\x04t.",
    "an unknown memo": b"\x80\x04h\7.",
    "a persistent id": b"\x80\x04Vx\nQ.",
    "a registered extension": b"\x80\x04\x82\1.",
    "a huge string": b"\x80\x04X\xff\xff\xff\x7fa.",
    "a huge number": b"\x80\x04\x8b\xff\xff\xff\x7fa.",
    "items of a number": b"\x80\x04K\1K\2K\3s.",
    "a call of a number": b"\x80\x04K\1)R.",
    "a call of an object": b"\x80\x04ctorch\nSize\n)R)R)R.",
    "a key that cannot be hashed": DEEP,
    "a module of torch": b"\x80\x04ctorch\nhub.load\n)R.",
    "a class named by endless pairs": b"\x80\x04" + PAIRS + b"\x8c\x01x\x93.",
}


@pytest.mark.parametrize("name", RAW)
def test_a_damaged_pickle(name, arena, dcp_folder):
    source = arena.copy(dcp_folder)
    (source / ".metadata").write_bytes(RAW[name])
    assert re.search(r"\.metadata (is refused|holds no Metadata)", arena.refused_merge(source))


def test_a_large_metadata(arena, dcp_folder):
    source = arena.copy(dcp_folder)
    with (source / ".metadata").open("r+b") as file:
        file.truncate(17 << 20)
    assert "at most 16,777,216" in arena.refused_merge(source)


def saved(value, folder) -> bytes:
    path = folder / "value.pt"
    torch.save(value, path)
    content = path.read_bytes()
    path.unlink()
    return content


CHUNKS = {
    "a list": ([1], "is a list, not one tensor"),
    "a dictionary of tensors": ({"a": torch.zeros(16, 24)}, "is a dict, not one tensor"),
    "a transposed tensor": (torch.zeros(24, 16).t(), "is not contiguous"),
    "a sparse tensor": (torch.eye(16, 24).to_sparse(), "refused|not one tensor|not a dense tensor"),
    "code": (Calls(os.system, "true"), "is refused"),
    "an object": (Calls(filesystem.FileSystemReader, "x"), "is refused"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_that_is_no_tensor(name, arena, dcp_folder):
    value, message = CHUNKS[name]
    source = arena.copy(dcp_folder)
    content = saved(value, arena.folder)
    (source / "__77_0.distcp").write_bytes(content)
    edit(source, place(relative_path="__77_0.distcp", offset=0, length=len(content)))
    assert re.search(message, arena.refused_merge(source))


def test_a_record_that_is_too_short(arena, dcp_folder):
    """The pickle of a chunk claims more elements than its record has."""
    source = arena.copy(dcp_folder)
    content = saved(torch.zeros(2, 24), arena.folder)
    assert content.count(struct.pack("<BBBB", 0x4B, 2, 0x4B, 24)) == 1
    (source / "__77_0.distcp").write_bytes(content.replace(b"K\2K\x18", b"K\x10K\x18"))
    edit(source, place(relative_path="__77_0.distcp", offset=0, length=len(content)))
    assert "__77_0.distcp" in arena.refused_merge(source)


def test_links(arena, dcp_folder):
    source = arena.copy(dcp_folder)
    shutil.move(source / "__1_0.distcp", arena.folder / "elsewhere.distcp")
    (source / "__1_0.distcp").symlink_to(arena.folder / "elsewhere.distcp")
    assert "is a link out of its folder" in arena.refused_merge(source)
    (source / "__1_0.distcp").unlink()
    shutil.move(arena.folder / "elsewhere.distcp", source / "__1_0.distcp")
    shutil.move(source / ".metadata", arena.folder / "elsewhere")
    (source / ".metadata").symlink_to(arena.folder / "elsewhere")
    assert "is a link out of its folder" in arena.refused_merge(source)


def test_a_truncated_file(arena, dcp_folder):
    source = arena.copy(dcp_folder)
    os.truncate(source / "__1_0.distcp", 900)
    assert "__1_0.distcp" in arena.refused_merge(source)


def test_another_backend_of_megatron_core(arena, dcp_folder):
    source = arena.copy(dcp_folder)
    (source / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "of the backend 'zarr'; only torch_dist" in arena.refused_merge(source)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "the checkpoint lacks" in arena.refused_merge(source)
