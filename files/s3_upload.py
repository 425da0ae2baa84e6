"""Sends a file to S3 in parts that are read from the disk while they are sent.

s3fs reads a part whole, and its connections copy it again: several parts at once take tens of
megabytes. Here a part takes the few kilobytes that are on their way, and a part whose sending
fails is begun again at its first byte.
"""

# (s3fs and botocore leave their types open)
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from mimetypes import guess_type
from pathlib import Path
from threading import Event
from typing import Any

from .seekable import SeekableReader

PARTS_AT_ONCE = 4
LARGEST_READ = 256 << 10  # bytes
# Seconds before a part is tried again, after the tries that botocore makes by itself.
WAITS = (0.1, 0.2, 0.4, 0.8)


class FilePart(SeekableReader):
    """Reads bytes [start, stop) of an open file, as a file of its own. Other parts may be read at
    the same time.
    """

    def __init__(self, descriptor: int, start: int, stop: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._start = start
        self._size = stop - start

    def _find_size(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        """Returns at most `LARGEST_READ` bytes, whatever is asked for; none at the end."""
        rest = max(0, self._size - self._position)
        count = min(rest, LARGEST_READ)
        if size >= 0:
            count = min(count, size)
        data = os.pread(self._descriptor, count, self._start + self._position)
        self._position += len(data)
        return data


def upload_in_parts(filesystem: Any, file: Path, path: str, part_bytes: int) -> None:
    """Copies a file to an object, which appears when all parts have arrived.

    Args:
        filesystem: The store, an `s3fs.S3FileSystem`.
        file: What to send, which is not empty.
        path: Bucket and key, as `filesystem` strips them of a URL.
        part_bytes: Bytes of each part but the last.

    Raises:
        Exception: Of s3fs; the parts that have arrived are removed then.
    """
    bucket, key, _ = filesystem.split_path(path)
    target = {"Bucket": bucket, "Key": key}
    kind, _ = guess_type(file)
    kinds = {"ContentType": kind} if kind else {}
    upload = {
        **target,
        "UploadId": filesystem.call_s3("create_multipart_upload", **target, **kinds)["UploadId"],
    }
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            bodies: list[FilePart] = []
            for start in range(0, size, part_bytes):
                stop = min(start + part_bytes, size)
                bodies.append(FilePart(opened.fileno(), start, stop))
            parts = _send_parts(filesystem, bodies, upload)
        filesystem.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
    except Exception:
        filesystem.call_s3("abort_multipart_upload", **upload)
        raise


def _send_parts(
    filesystem: Any, bodies: Sequence[FilePart], upload: dict[str, Any]
) -> list[dict[str, Any]]:
    """Sends all parts, a few at a time. After an error no further one is begun."""
    has_failed = Event()

    def send(number: int, body: FilePart) -> str:
        if has_failed.is_set():
            return ""  # Nobody asks for it: the results are read in order, up to the error.
        try:
            return _send_part(filesystem, body, number, upload)
        except BaseException:
            has_failed.set()
            raise

    pool = ThreadPoolExecutor(PARTS_AT_ONCE)
    try:
        sent = [pool.submit(send, number, body) for number, body in enumerate(bodies, 1)]
        return [{"PartNumber": number, "ETag": tag.result()} for number, tag in enumerate(sent, 1)]
    finally:
        pool.shutdown(cancel_futures=True)


def _send_part(filesystem: Any, body: FilePart, number: int, upload: dict[str, Any]) -> str:
    """Sends one part; returns the store's tag of it.

    botocore rewinds a body before it tries again. `filesystem.call_s3`, which tries again after
    botocore, does not, and would send what is left of it: therefore its client is called here.
    """
    import fsspec.asyn
    import s3fs.core
    import s3fs.errors
    from botocore.exceptions import ClientError

    wait_for: Callable[..., Any] = fsspec.asyn.sync
    explain: Callable[[Exception], Exception] = s3fs.errors.translate_boto_error
    passing: tuple[type[Exception], ...] = s3fs.core.S3_RETRYABLE_ERRORS
    client = wait_for(filesystem.loop, filesystem.get_s3, upload["Bucket"])
    tries = 0
    while True:
        body.seek(0)
        try:
            answer = wait_for(
                filesystem.loop, client.upload_part, Body=body, PartNumber=number, **upload
            )
            return answer["ETag"]
        except (ClientError, *passing) as error:
            is_refused = isinstance(error, ClientError) and "SlowDown" not in str(error)
            if is_refused or tries == len(WAITS):
                raise explain(error) from error
            time.sleep(WAITS[tries])
            tries += 1
