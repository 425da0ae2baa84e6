"""Damaged `.idx` and `.bin` files: always a clear error that names the file, never other tokens."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from every_case import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.data import IndexedDataset, IndexedDatasetWriter

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[]], [[7, 8, 9, 10]]]
MARKS_AT = (
    34 + 5 * 12
)  # the document marks: the only part in which another value can be as plausible
fuzz = settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with IndexedDatasetWriter(tmp_path / "good", np.uint16) as writer:
        for sequences in DOCUMENTS:
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()
    return tmp_path / "good"


def content(prefix: Path) -> list:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))] + [
        data.document(i).tolist() for i in range(data.num_documents)
    ]


def damaged(prefix: Path, index: bytes) -> Path:
    path = prefix.with_name("bad")
    Path(f"{path}.idx").write_bytes(index)
    Path(f"{path}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes())
    return path


@fuzz
@given(data=st.data())
def test_a_flipped_bit_is_reported_or_changes_only_plausible_document_marks(data, dataset):
    raw = bytearray(Path(f"{dataset}.idx").read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    error, found = "", []
    try:
        found = content(damaged(dataset, bytes(raw)))
    except ValueError as reported:
        error = str(reported)
    if error:
        assert "bad.idx" in error or "bad.bin" in error
    else:  # a mark moved between its neighbours, or another dtype of the same width: no check sum could tell
        assert place >= MARKS_AT or (place == 17 and raw[17] in (3, 8))
        assert found[:5] == content(dataset)[:5]


@fuzz
@given(keep=st.integers(0, 34 + 5 * 12 + 5 * 8 - 1))
def test_a_truncated_index_is_reported(keep, dataset):
    path = damaged(dataset, Path(f"{dataset}.idx").read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"bad\.idx"):
        IndexedDataset(path)


@fuzz
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_reported(raw, dataset):
    with pytest.raises(ValueError, match=r"bad\.idx"):
        IndexedDataset(damaged(dataset, raw))


@fuzz
@given(
    counts=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    code=st.integers(0, 255),
    rest=st.binary(max_size=150),
)
def test_a_good_header_with_any_counts_is_reported(counts, code, rest, dataset):
    raw = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, *counts) + rest
    with pytest.raises(ValueError, match=r"bad\.(idx|bin)"):
        IndexedDataset(damaged(dataset, raw))


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (struct.pack("<9sQ", b"MMIDIDX\0\0", 2), "version 2"),
        (struct.pack(">9sQ", b"MMIDIDX\0\0", 1), "big-endian"),
        (struct.pack("<8sQQ", b"TNTIDX\0\0", 1, 4), "legacy"),
        (b"MMIDIDX\0\0", "truncated"),
        (b"", "empty"),
        (b"{}", "not a Megatron-LM index"),
    ],
)
def test_foreign_indices_are_named_for_what_they_are(head, named, dataset):
    rest = Path(f"{dataset}.idx").read_bytes()[len(head) :] if len(head) > 9 else b""
    with pytest.raises(ValueError, match=named):
        IndexedDataset(damaged(dataset, head + rest))


@pytest.mark.parametrize("size", [0, 1, 19, 21, 40])
def test_a_bin_of_another_length_is_reported(size, dataset):
    Path(f"{dataset}.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=r"good\.bin has .* but the index good\.idx describes 20"):
        IndexedDataset(dataset)


def test_missing_halves_are_named(dataset):
    Path(f"{dataset}.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"good\.bin does not exist"):
        IndexedDataset(dataset)


def test_indices_out_of_range_are_refused(dataset):
    data = IndexedDataset(dataset)
    assert data[-1].tolist() == [7, 8, 9, 10]
    for access in (
        lambda: data[5],
        lambda: data[-6],
        lambda: data.document(4),
        lambda: data.document(-1),
    ):
        with pytest.raises(IndexError, match="good"):
            access()
