"""Lying, damaged and hostile safetensors headers."""

from __future__ import annotations

import json
import os
import re
import struct

import pytest

NORM = "transformer.ln_f.weight"


def set_entry(**changes):
    def change(header):
        header[NORM].update(changes)

    return change


def swap_offsets(header):
    header[NORM]["data_offsets"] = header[NORM]["data_offsets"][::-1]


def overlap(header):
    first, last = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [first - 4, last - 4]


def duplicate_key(header):
    text = json.dumps(header)
    return (text[:-1] + f', "{NORM}": ' + json.dumps(header[NORM]) + "}").encode()


def drop(header):
    del header[NORM]


def move_behind_the_end(header):
    header[NORM]["data_offsets"] = [1 << 40, (1 << 40) + 64]


LIES = {
    "not JSON": (lambda header: b"{not json}", "not valid JSON"),
    "no object": (lambda header: b"[1, 2, 3]", "does not start with"),
    "empty header": (lambda header: b"", "does not start with"),
    "not UTF-8": (lambda header: b'{"\xff\xfe": 1}', "not valid JSON"),
    "nested without end": (
        lambda header: b'{"a":' + b"[" * 100_000,
        "nested too deeply|not valid JSON",
    ),
    "duplicate tensor": (duplicate_key, "appears twice"),
    "NaN in the metadata": (
        lambda header: b'{"__metadata__": {"a": NaN}}',
        "NaN is not a JSON number",
    ),
    "Infinity as an offset": (lambda header: b'{"a": Infinity}', "Infinity is not a JSON number"),
    "metadata of numbers": (
        lambda header: header | {"__metadata__": {"format": 1}},
        "must map names to text",
    ),
    "metadata as a list": (
        lambda header: header | {"__metadata__": ["pt"]},
        "must map names to text",
    ),
    "unknown type": (set_entry(dtype="F33"), r"ln_f\.weight.*F33"),
    "type of another size": (set_entry(dtype="F64"), r"ln_f\.weight.* needs 128"),
    "type as a number": (set_entry(dtype=4), r"ln_f\.weight.*has type 4"),
    "negative shape": (set_entry(shape=[-16]), r"ln_f\.weight.*whole numbers"),
    "fractional shape": (set_entry(shape=[16.0]), r"ln_f\.weight.*whole numbers"),
    "truth value in the shape": (set_entry(shape=[16, True]), r"ln_f\.weight.*whole numbers"),
    "astronomic shape": (set_entry(shape=[1 << 40, 1 << 40]), r"ln_f\.weight.* needs"),
    "shape beyond 64 bits": (set_entry(shape=[1 << 70]), r"ln_f\.weight.*whole numbers"),
    "three offsets": (set_entry(data_offsets=[0, 4, 8]), r"ln_f\.weight.*two data_offsets"),
    "offsets as text": (set_entry(data_offsets=["0", "64"]), r"ln_f\.weight.*two data_offsets"),
    "negative offset": (set_entry(data_offsets=[-64, 0]), r"ln_f\.weight.*whole numbers"),
    "offsets reversed": (swap_offsets, r"ln_f\.weight.* claims bytes"),
    "offsets behind the end": (move_behind_the_end, r"ln_f\.weight.*truncated or wrong"),
    "overlapping tensors": (overlap, "overlaps"),
    "unknown field": (set_entry(strides=[1]), "exactly dtype, shape and data_offsets"),
    "entry as a list": (lambda header: header | {NORM: [0, 64]}, "exactly dtype"),
    "nameless tensor": (lambda header: header | {"": header[NORM]}, "must have a name"),
    "gap": (drop, "leaves a gap|bytes after its last tensor"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header(lie, arena, gpt2_folder, rewrite_header):
    change, message = LIES[lie]
    source = arena.copy(gpt2_folder)
    rewrite_header(source / "model.safetensors", change)
    refusal = arena.refused_split(source)
    assert "model.safetensors" in refusal
    assert re.search(message, refusal), refusal


LENGTHS = {
    "of 2^63 bytes": (struct.pack("<Q", 1 << 63), "declares a header of"),
    "of the whole file": (None, "declares a header of"),
    "of nothing": (struct.pack("<Q", 0), "does not start with"),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_declared_length(length, arena, gpt2_folder):
    content, message = LENGTHS[length]
    path = arena.copy(gpt2_folder) / "model.safetensors"
    original = path.read_bytes()
    path.write_bytes((content or struct.pack("<Q", len(original))) + original[8:])
    assert message in arena.refused_split(path.parent)


@pytest.mark.parametrize("kept", [0, 7, 8, 300, -1, -64])
def test_a_truncated_file(kept, arena, gpt2_folder):
    path = arena.copy(gpt2_folder) / "model.safetensors"
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    assert "model.safetensors" in arena.refused_split(path.parent)


def test_bytes_after_the_end(arena, gpt2_folder):
    path = arena.copy(gpt2_folder) / "model.safetensors"
    with path.open("ab") as file:
        file.write(b"hidden")
    assert "6 bytes after its last tensor" in arena.refused_split(path.parent)
