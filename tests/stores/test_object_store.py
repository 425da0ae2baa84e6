"""URLs, and errors of stores in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardzoo.files.object_store import (
    find_object,
    find_url,
    list_objects,
    read_range,
    read_ranges,
    remove_object,
    write_object,
)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("s3://bucket/folder/", "s3://bucket/folder"),
        (Path("s3://bucket/folder"), "s3://bucket/folder"),  # A Path keeps one slash.
        ("memory://a", "memory://a"),
        ("hf://org/name@main/part", "hf://org/name@main/part"),
        ("runs/first", None),
        (Path("/data"), None),
        ("org/name@v1.0", None),
        ("a:/b", None),
        ("corpus.jsonl:0.7", None),
    ],
)
def test_urls_are_told_from_paths(name, url):
    assert find_url(name) == url


@pytest.mark.parametrize(
    "name", ["s4://bucket/model", Path("s4://bucket/model"), "s4:/bucket/model"]
)
def test_urls_of_no_store_are_refused(name, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"^s4://bucket/model: there is no store s4://; use s3://, gs://"
    ):
        find_url(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s4:").mkdir()
    if "://" not in str(name):  # There may be a folder of that name.
        assert find_url(name) is None


def test_a_url_names_a_bucket():
    with pytest.raises(ValueError, match="names no bucket"):
        find_url("s3://")


def test_objects_of_a_folder(bucket):
    write_object(f"{bucket}/model/a", b"0123456789")
    write_object(f"{bucket}/model/deep/b", b"1")
    write_object(f"{bucket}/model-2/c", b"1")  # Its name only begins like the folder's.
    found = list_objects(f"{bucket}/model")
    assert {name: entry.size for name, entry in found.items()} == {"a": 10, "deep/b": 1}
    assert found["a"] == find_object(f"{bucket}/model/a")
    assert list_objects(f"{bucket}/model/a")[""].size == 10
    assert find_object(f"{bucket}/model") is None
    assert read_range(f"{bucket}/model/a", 2, 4) == b"23"
    assert read_ranges(f"{bucket}/model/a", [(0, 1), (5, 7)]) == [b"0", b"56"]

    write_object(f"{bucket}/model/a", b"9876543210")
    assert find_object(f"{bucket}/model/a") != found["a"]
    with pytest.raises(FileExistsError):
        write_object(f"{bucket}/model/a", b"", create=True)
    remove_object(f"{bucket}/model/a")
    remove_object(f"{bucket}/model/a")
    write_object(f"{bucket}/model/a", b"", create=True)
    with pytest.raises(FileNotFoundError, match="no such object"):
        read_range(f"{bucket}/model/none", 0, 1)


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("gs", "gcsfs", "gcs"), ("abfs", "adlfs", "azure")]
)
def test_a_missing_package_is_named(scheme, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    wanted = rf"needs the package {package}: pip install 'shardzoo\[{extra}\]'"
    with pytest.raises(ValueError, match=wanted):
        list_objects(f"{scheme}://bucket/model")
