"""Files that are sent to S3 in parts, with a client that fails."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("s3fs", reason="S3 needs s3fs: pip install -e '.[dev]'")
import fsspec.asyn
from botocore.exceptions import ClientError, ConnectionClosedError

from shardzoo.files import s3_upload
from shardzoo.files.s3_upload import FilePart, upload_in_parts


class Store:
    """What `upload_in_parts` asks of s3fs.

    Attributes:
        failures: Part -> what its next tries raise, after some bytes were read.
        parts: What has arrived.
        calls: The other calls, in order.
        tries: The parts whose sending was begun, in order.
    """

    def __init__(self) -> None:
        self.loop = fsspec.asyn.get_loop()
        self.failures: dict[int, list[Exception]] = {}
        self.parts: dict[int, bytes] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.tries: list[int] = []

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def call_s3(self, method: str, **options: Any) -> dict[str, Any]:
        self.calls.append((method, options))
        return {"UploadId": "first"}

    async def get_s3(self, bucket: str) -> Store:
        assert bucket == "models"
        return self

    async def upload_part(self, Body: FilePart, PartNumber: int, **names: str) -> dict[str, str]:
        assert names == {"Bucket": "models", "Key": "a/b.json", "UploadId": "first"}
        self.tries.append(PartNumber)
        pieces = [Body.read(3)]
        if self.failures.get(PartNumber):
            raise self.failures[PartNumber].pop()
        while piece := Body.read():
            pieces.append(piece)
        self.parts[PartNumber] = b"".join(pieces)
        return {"ETag": f"tag {PartNumber}"}


@pytest.fixture
def store(monkeypatch) -> Store:
    monkeypatch.setattr(s3_upload, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(s3_upload, "LARGEST_READ", 7)
    return Store()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "b.json"
    path.write_bytes(bytes(range(251)) * 3)
    return path


def refuse(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": ""}}, "UploadPart")


def test_a_part_that_fails_is_begun_again_at_its_first_byte(store, file):
    broken = ConnectionClosedError(endpoint_url="http://here")
    store.failures = {2: [refuse("SlowDown"), broken], 8: [broken]}
    upload_in_parts(store, file, "models/a/b.json", 100)
    assert [len(store.parts[number]) for number in range(1, 9)] == [100] * 7 + [53]
    assert b"".join(store.parts[number] for number in range(1, 9)) == file.read_bytes()
    (begin, kinds), (end, result) = store.calls
    assert (begin, kinds["ContentType"]) == ("create_multipart_upload", "application/json")
    assert end == "complete_multipart_upload"
    tags = [{"PartNumber": number, "ETag": f"tag {number}"} for number in range(1, 9)]
    assert result["MultipartUpload"] == {"Parts": tags}


@pytest.mark.parametrize("code", ["AccessDenied", "SlowDown"])
def test_an_upload_that_fails_leaves_no_parts(code, store, file, monkeypatch):
    monkeypatch.setattr(s3_upload, "PARTS_AT_ONCE", 1)
    store.failures = {2: [refuse(code) for _ in range(9)]}
    with pytest.raises(PermissionError if code == "AccessDenied" else OSError):
        upload_in_parts(store, file, "models/a/b.json", 50)
    assert store.calls[-1] == (
        "abort_multipart_upload",
        {"Bucket": "models", "Key": "a/b.json", "UploadId": "first"},
    )
    assert len(store.calls) == 2
    assert store.tries.count(2) == (1 if code == "AccessDenied" else 3)
    assert max(store.tries) == 2  # The rest was not begun.


def test_a_part_is_a_file(file):
    with file.open("rb") as opened:
        part = FilePart(opened.fileno(), 5, 9)
        assert part.read() == bytes([5, 6, 7, 8])
        assert part.read(1) == b""
        assert part.seek(-1, 2) == 3
        assert part.read(8) == bytes([8])
        assert (part.seek(1), part.seek(1, 1), part.tell()) == (1, 2, 2)
        assert part.read(1) == bytes([7])
