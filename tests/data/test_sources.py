"""Text in all its forms, and what is no text."""

from __future__ import annotations

import gzip
import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from every_case import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.data import SourceReport, iter_documents, python_stdlib, skip_bad
from shardzoo.data.text import records as records_module
from shardzoo.data.text.records import lines_starting_in, text_pieces
from shardzoo.data.text.sources import plan_chunks


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


cuts = st.lists(st.integers(0, 400), max_size=4).map(sorted)


@settings(max_examples=examples(200), deadline=None)
@given(raw=st.text("ab\n é", max_size=300).map(str.encode), cuts=cuts, block=st.integers(4, 64))
def test_pieces_of_any_ranges_join_to_the_file(raw, cuts, block):
    borders = [0, *[min(cut, len(raw)) for cut in cuts], len(raw)]
    whole = list(text_pieces(io.BytesIO(raw), 0, len(raw), block))
    parts = [
        piece
        for first, last in pairwise(borders)
        for piece in text_pieces(io.BytesIO(raw), first, last, block)
    ]
    assert parts == whole
    assert b"".join(whole) == raw


@settings(max_examples=examples(200), deadline=None)
@given(
    lines=st.lists(st.binary(max_size=9).filter(lambda b: b"\n" not in b), max_size=20), cuts=cuts
)
def test_lines_of_any_ranges_are_all_lines_once(lines, cuts):
    raw = b"".join(line + b"\n" for line in lines)
    borders = [0, *[min(cut, len(raw)) for cut in cuts], len(raw)]
    found = [
        line
        for first, last in pairwise(borders)
        for line in lines_starting_in(io.BytesIO(raw), first, last)
    ]
    assert found == [line + b"\n" for line in lines]


def test_cuts_of_a_text_without_line_ends_respect_characters():
    raw = ("€" * 1_000_000).encode()
    pieces = list(text_pieces(io.BytesIO(raw), 0, len(raw), 512))
    assert len(pieces) == 3  # 3 MB, cut at every MiB
    assert "".join(piece.decode("utf-8") for piece in pieces) == "€" * 1_000_000


def test_small_chunks_give_the_same_documents(jsonl, texts, monkeypatch):
    assert list(iter_documents(jsonl)) == texts
    monkeypatch.setattr("shardzoo.data.text.sources.CHUNK_BYTES", 777)
    assert len(plan_chunks(jsonl)) > 50
    assert list(iter_documents(jsonl)) == texts


def test_every_kind_of_source_gives_the_same_documents(jsonl, texts, tmp_path):
    import datasets
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / "sub" / f"{number:04}.txt").write_text(text)
    (folder / ".hidden").write_text("not this")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "t.parquet", row_group_size=30)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "hf"))
    for source in (folder, tmp_path / "t.parquet", tmp_path / "hf"):
        assert list(iter_documents(source)) == texts
    assert list(iter_documents([jsonl, tmp_path / "t.parquet"])) == texts + texts
    assert list(iter_documents([tmp_path / "hf", folder, jsonl])) == texts + texts + texts


def test_one_text_file_becomes_several_documents(tmp_path):
    text = "\n\n".join(f"Paragraph {i} with some words." for i in range(500))
    (tmp_path / "book.txt").write_text(text)
    documents = list(iter_documents(tmp_path / "book.txt"))
    assert "".join(documents) == text
    assert len(documents) > 20
    assert all(document.startswith("Paragraph") for document in documents)


def test_the_standard_library_is_python_source_without_packages_and_tests():
    files = python_stdlib()
    assert len(files) > 300
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)
    assert 5e6 < sum(path.stat().st_size for path in files) < 40e6
    assert any("import" in document for document in iter_documents(None))


HOSTILE = [
    (b'{"text": 3}', "not a string"),
    (b'{"txt": "a"}', "no key 'text'; the keys are 'txt'"),
    (b"[1]", "a JSON list"),
    (b"null", "a JSON NoneType"),
    (b"{", "not JSON: it ends too early"),
    (b'{"text": "cut o', "not JSON: it ends inside a string"),
    (b'{"text": "a\tb"}', "not JSON: a line break or tab inside a string at column 12"),
    (b"\0\0", "not JSON"),
    (b'{"text": "\xff"}', "invalid UTF-8"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"text": ' + b"9" * 5000 + b"}", "integer string conversion|not a string"),
]


@pytest.mark.parametrize(("line", "reason"), HOSTILE)
def test_bad_json_lines_are_named_by_file_and_line(line, reason, tmp_path):
    good = b'{"text": "good"}'
    path = write_lines(tmp_path / "x.jsonl", [good, b"", line, good])
    with pytest.raises(ValueError, match=rf"x\.jsonl, record 3: .*({reason})"):
        list(iter_documents(path))
    report = SourceReport()
    assert list(iter_documents(path, on_bad=skip_bad, report=report)) == ["good", "good"]
    assert (report.bad, report.empty, report.documents) == (1, 1, 2)
    assert "record 3" in report.first_bad[0]


def test_line_numbers_count_over_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.sources.CHUNK_BYTES", 64)
    lines = [json.dumps({"text": f"line {i}"}).encode() for i in range(40)]
    lines[28] = b"oops"
    with pytest.raises(ValueError, match="record 29:"):
        list(iter_documents(write_lines(tmp_path / "x.jsonl", lines)))


def test_a_giant_line_is_named_and_not_read_into_memory(tmp_path):
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(100):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n{"text": "last"}\n')
    report = SourceReport()
    assert list(iter_documents(path, on_bad=skip_bad, report=report)) == ["first", "last"]
    assert report.first_bad == [f"{path}, record 2: line longer than 16 MiB"]
    assert report.bytes < 20 << 20


def test_one_giant_text_line_is_cut(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_bytes(b"word " * (1 << 20))
    documents = list(iter_documents(tmp_path / "x.txt"))
    assert sum(map(len, documents)) == 5 << 20
    assert max(map(len, documents)) <= records_module.LARGEST_RECORD_BYTES // 16


def test_a_bad_file_in_a_folder_is_named_by_its_own_numbers(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"good")
    (tmp_path / "3.txt").write_bytes(b"bad \xff")
    report = SourceReport()
    assert len(list(iter_documents(tmp_path, on_bad=skip_bad, report=report))) == 4
    assert report.first_bad == [f"{tmp_path}/3.txt, record 1: invalid UTF-8 at byte 4 of the piece"]


@pytest.mark.parametrize("raw", [b"abc\xff\xfe", b"abc\0def"])
def test_text_that_is_none_is_named(raw, tmp_path):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(
        ValueError,
        match=r"a\.txt, record 1: (invalid UTF-8|NUL byte) at byte 3|a\.txt, record 1: NUL",
    ):
        list(iter_documents(tmp_path / "a.txt"))


def test_nothing_to_read_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").mkdir()
    for name in ("x", "y"):
        (tmp_path / "binary" / name).write_bytes(b"\0" * 10)
    (tmp_path / "no.parquet").write_bytes(b"PAR0")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    for name, reason in [
        ("missing", "does not exist"),
        ("empty", "holds no text"),
        ("empty.txt", "holds no text"),
        ("binary", "holds no text"),
        ("no.parquet", "not a parquet file"),
        ("x.jsonl.gz", "is compressed; unpack it"),
    ]:
        with pytest.raises(ValueError, match=rf"{name} .*{reason}|{name} {reason}"):
            list(iter_documents(tmp_path / name))
    with pytest.raises(ValueError, match="list of inputs is empty"):
        plan_chunks([])
    with pytest.raises(ValueError, match="does not exist or is not a file"):
        plan_chunks([tmp_path / "missing"])


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert list(iter_documents(tmp_path / "x.jsonl")) == ["a"]


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    raw=st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.sampled_from(
                [b'{"text": "a"}', b"{", b"\0", b"\xff", b"[]", b'{"text": null}', b"\r"]
            ),
            max_size=8,
        ).map(b"\n".join),
    ),
    suffix=st.sampled_from([".jsonl", ".txt", ".json", ""]),
)
def test_any_bytes_are_documents_or_named_bad_records(raw, suffix, tmp_path):
    path = tmp_path / f"any{suffix}"
    path.write_bytes(raw)
    report = SourceReport()
    if not raw:
        with pytest.raises(ValueError, match="holds no text"):
            iter_documents(path)
        return
    documents = list(iter_documents(path, on_bad=skip_bad, report=report))
    assert len(documents) == report.documents
    assert all(document.encode("utf-8") and not document.isspace() for document in documents)
    assert len(report.first_bad) == min(report.bad, 10)
    assert all(str(path) in line for line in report.first_bad)
    if report.bad:
        with pytest.raises(ValueError, match=r"bad record in .*, record "):
            list(iter_documents(path))
