"""Files of `torch.save` that run code when unpickled, or lie about their tensors. None of it is executed."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from shardzoo.checkpoint.formats.torch_file import load_without_storage, locate_tensors
from shardzoo.checkpoint.stored_tensor import read_file_state


class Calls:
    """Unpickling this calls a function."""

    def __init__(self, function, *arguments) -> None:
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.fixture
def folder(arena, gpt2_folder):
    """A GPT-2 whose weights are yet to be written to pytorch_model.bin."""
    source = arena.copy(gpt2_folder)
    (source / "model.safetensors").unlink()
    return source


@pytest.fixture(scope="module")
def weights(gpt2_folder):
    return load_file(gpt2_folder / "model.safetensors")


def test_a_harmless_one_converts(arena, folder, weights, gpt2_folder, hashes):
    torch.save(weights, folder / "pytorch_model.bin")
    assert arena.convert("merge", folder, arena.destination) == (0, "")
    assert hashes(arena.destination) == hashes(gpt2_folder)
    assert not (arena.destination / "pytorch_model.bin").exists()


def bombs(marker):
    return {
        "os.system": Calls(os.system, f"touch {marker}"),
        "eval": Calls(eval, f"open({str(marker)!r}, 'w')"),
        "exec": Calls(exec, f"open({str(marker)!r}, 'w')"),
        "open": Calls(builtins.open, str(marker), "w"),
        "pickle in a pickle": Calls(
            pickle.loads, pickle.dumps(Calls(os.system, f"touch {marker}"))
        ),
        "torch.load": Calls(torch.load, str(marker)),
        "getattr": Calls(getattr, "text", "upper"),
    }


@pytest.mark.parametrize(
    "name", ["os.system", "eval", "exec", "open", "pickle in a pickle", "torch.load", "getattr"]
)
@pytest.mark.parametrize("place", ["value", "beside", "metadata"])
def test_code_is_refused_and_not_run(name, place, arena, folder, weights):
    marker = arena.folder / "executed"
    bomb = bombs(marker)[name]
    state = OrderedDict(weights)
    if place == "value":
        state["transformer.ln_f.bias"] = bomb
    elif place == "beside":
        state = {"module": state, "lr_scheduler": bomb}
    else:
        state._metadata = bomb  # type: ignore[attr-defined] - as torch keeps versions there
    torch.save(state, folder / "pytorch_model.bin")
    refusal = arena.refused_split(folder)
    assert "pytorch_model.bin is refused" in refusal
    assert not marker.exists()


@pytest.mark.parametrize("place", ["mp_rank", "index"])
def test_code_in_other_files(place, arena, folder, weights):
    marker = arena.folder / "executed"
    bomb = {"module": {**weights, "x": Calls(os.system, f"touch {marker}")}}
    if place == "mp_rank":
        torch.save(bomb, folder / "mp_rank_00_model_states.pt")
    else:
        torch.save(bomb, folder / "part.bin")
        (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "part.bin"}}')
    assert "is refused" in arena.refused_split(folder)
    assert not marker.exists()


def test_a_bare_pickle(arena, folder):
    marker = arena.folder / "executed"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Calls(os.system, f"touch {marker}")))
    assert "not in a format of torch.save" in arena.refused_split(folder)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"PK\3\4" + bytes(2000), b"\x80\x02}q\x00."])
def test_no_file_of_torch(content, arena, folder):
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin" in arena.refused_split(folder)


@pytest.mark.parametrize(
    "value", [[1, 2], {"a": 1}, {"a": "text"}, {1: torch.zeros(2)}, torch.zeros(3)]
)
def test_no_named_tensors(value, arena, folder):
    torch.save(value, folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in arena.refused_split(folder)


# A pair of the same pair of the same pair …: hashing it, or its text, takes 2^45 steps.
SHARED = b")q\x00" + b"".join(b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(45))


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


ENDLESS = {
    "the version": b"}(" + text("checkpoint_version") + SHARED + text("model") + b"}u.",
    "a name": b"}(" + SHARED + b"K\x01u.",
    "a name of a tensor": b"}(" + text("model") + b"}(" + SHARED + b"K\x01uu.",
    "an argument": b"}(" + text("args") + b"}(" + text("a") + SHARED + b"uu.",
    "a called function": SHARED + b")R.",
    "a storage": SHARED + b"Q.",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_small_pickle_of_endless_work(name, arena, folder):
    pickled = b"\x80\x02" + ENDLESS[name]
    old = b"".join(pickle.dumps(part, 2) for part in (MAGIC_NUMBER, PROTOCOL_VERSION, {}))
    (folder / "pytorch_model.bin").write_bytes(old + pickled)
    assert "it describes more than" in arena.refused_split(folder)

    for path in (
        "pytorch_model.bin",
        "mp_rank_00/model_optim_rng.pt",
        "mp_rank_00_model_states.pt",
    ):
        (folder / "pytorch_model.bin").unlink(missing_ok=True)
        (folder / path).parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / path, "w") as file:
            file.writestr("archive/data.pkl", pickled)
            file.writestr("archive/byteorder", "little")
        assert "it describes more than" in arena.refused_split(folder)
        (folder / path).unlink()


def test_a_function_that_is_none_is_not_called(arena, folder):
    pickled = b"\x80\x02]q\x00h\x00a)R."  # a list in itself
    (folder / "pytorch_model.bin").write_bytes(b"")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", pickled)
    assert "calls something that is no class" in arena.refused_split(folder)


def rezip(path, change) -> None:
    """Rewrites a zip file with the contents that `change(name, content)` returns, and the method of compression."""
    original = path.with_suffix(".original")
    shutil.move(path, original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            content, method = change(info.filename, source.read(info))
            target.writestr(zipfile.ZipInfo(info.filename), content, compress_type=method)
    original.unlink()


def shorten(name, content):
    return content[:16] if re.search(r"/data/\d+$", name) else content, zipfile.ZIP_STORED


def compress(name, content):
    return content, zipfile.ZIP_DEFLATED


def big_endian(name, content):
    return b"big" if name.endswith("byteorder") else content, zipfile.ZIP_STORED


@pytest.mark.parametrize("change", [shorten, compress, big_endian])
def test_lying_records(change, arena, folder, weights):
    path = folder / "pytorch_model.bin"
    torch.save(weights, path)
    rezip(path, change)
    assert "pytorch_model.bin" in arena.refused_split(folder)


def without_storage_0(archive, contents):
    for name, content in contents.items():
        if name != "archive/data/0":
            archive.writestr(name, content)


def with_two_pickles(archive, contents):
    for name, content in contents.items():
        archive.writestr(name, content)
    archive.writestr("other/data.pkl", contents["archive/data.pkl"])


@pytest.mark.parametrize(
    ("write", "before", "message"),
    [
        (without_storage_0, b"", "has no record of its storage '0'"),
        (with_two_pickles, b"", "two records of the name 'data.pkl'"),
        (None, b"#!/bin/sh\n", "has bytes before its zip format"),
    ],
)
def test_records_that_torch_would_not_write(write, before, message, arena, folder, weights):
    path = folder / "pytorch_model.bin"
    saved = io.BytesIO()
    torch.save(weights, saved)
    if write is not None:
        with zipfile.ZipFile(saved) as archive:
            contents = {
                f"archive/{name.partition('/')[2]}": archive.read(name)
                for name in archive.namelist()
            }
        saved = io.BytesIO()
        with zipfile.ZipFile(saved, "w") as archive:
            write(archive, contents)
    path.write_bytes(before + saved.getvalue())
    assert message in arena.refused_split(folder)


@pytest.mark.parametrize("old", [False, True])
def test_a_sparse_tensor_is_not_checked_later(old, arena, folder, weights):
    """torch's unpickler remembers sparse tensors, and the next torch.load would check this one without storage."""
    name = "transformer.wte.weight"
    sparse = {**weights, name: weights[name].to_sparse()}
    torch.save(weights, arena.folder / "dense.pt")
    torch.save(sparse, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    with torch.sparse.check_sparse_tensor_invariants():
        assert f"tensor {name} " in (refusal := arena.refused_split(folder))
        assert "is not a dense tensor" in refusal
        assert torch.load(arena.folder / "dense.pt").keys() == weights.keys()


@pytest.mark.parametrize("old", [False, True])
def test_types_without_a_class_of_storages(old, tmp_path):
    """Since torch 2.1 newer types are saved in storages of bytes."""
    values = {
        "a": torch.tensor([[1, 2, 3], [4, 5, 65535]], dtype=torch.uint16),
        "b": torch.linspace(-2, 2, 10).to(torch.float8_e4m3fn)[3:],
    }
    torch.save(values, tmp_path / "file.pt", _use_new_zipfile_serialization=not old)
    path = tmp_path / "file.pt"
    found = locate_tensors(path, load_without_storage(path), read_file_state(path))
    content = path.read_bytes()
    for name, value in values.items():
        assert found[name].shape == tuple(value.shape)
        stored = content[found[name].offset :][: found[name].nbytes]
        assert stored == value.view(torch.uint8).numpy().tobytes()


def test_a_truncated_zip(arena, folder, weights):
    path = folder / "pytorch_model.bin"
    torch.save(weights, path)
    os.truncate(path, path.stat().st_size // 2)
    assert "pytorch_model.bin" in arena.refused_split(folder)


def test_a_tensor_that_is_not_contiguous(arena, folder, weights):
    name = "transformer.h.0.mlp.c_fc.weight"
    torch.save({**weights, name: weights[name].t().contiguous().t()}, folder / "pytorch_model.bin")
    found = arena.converted(folder)[name]
    torch.testing.assert_close(found, weights[name], rtol=0, atol=0, equal_nan=True)


def test_a_view_out_of_its_storage(arena, folder, weights):
    """A view whose size was changed in the pickle to reach beyond its storage."""
    path = folder / "pytorch_model.bin"
    torch.save({**weights, "transformer.wte.weight": torch.zeros(17, 16)}, path)

    def enlarge(name, content):
        if name.endswith("data.pkl"):
            assert content.count(b"K\x11K\x10") == 1  # the sizes 17, 16
            content = content.replace(b"K\x11K\x10", b"K\xffK\x10")
        return content, zipfile.ZIP_STORED

    rezip(path, enlarge)
    assert "pytorch_model.bin" in arena.refused_split(folder)


@pytest.mark.parametrize("old", [False, True])
def test_an_allocation(old, arena, folder, weights):
    """A bytearray of 3 GB, which torch's restricted unpickler would fill with zeros."""
    state = {"module": weights, "state": Calls(bytearray, 3 << 30)}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert "holds a bytearray" in arena.refused_split(folder)


@pytest.mark.parametrize("old", [False, True])
def test_many_pickled_bytes(old, arena, folder, weights):
    state = {"module": weights, "state": "x" * (5 << 20)}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert "pickled bytes" in arena.refused_split(folder)
