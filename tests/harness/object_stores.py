"""Fixtures of object stores. Every day tests use the one of this process; `memory://` and `s3://` are read
and written by the same code above fsspec."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import count

import pytest
from every_case import every_day
from s3_server import BUCKET, S3Server, serve

_NUMBERS = count()
needs_s3 = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None,
    reason="the S3 server needs moto and s3fs: pip install -e '.[dev]'",
)


@pytest.fixture(autouse=True)
def objects_folder(tmp_path_factory, monkeypatch):
    """The folder of local copies."""
    folder = tmp_path_factory.mktemp("objects")
    monkeypatch.setenv("SHARDZOO_OBJECTS", str(folder))
    return folder


@pytest.fixture
def memory_bucket() -> str:
    """The URL of an empty folder in the store of this process."""
    return f"memory://test-{next(_NUMBERS)}"


@pytest.fixture(scope="session")
def s3_server():
    with serve() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch) -> S3Server:
    """The server, which this process and those that it starts reach by `s3://`."""
    from shardzoo.files import object_store

    for name, value in s3_server.variables.items():
        monkeypatch.setenv(name, value)
    object_store._filesystems.clear()
    s3_server.refuse = lambda method, path: False
    s3_server.on_request = lambda: None
    s3_server.respond = None
    s3_server.sent.clear()
    return s3_server


@pytest.fixture
def s3_bucket(s3: S3Server) -> str:
    """The URL of an empty folder on the S3 server."""
    from shardzoo.files import object_store

    filesystem = object_store._open_store("s3://any")
    if not filesystem.exists(BUCKET):
        filesystem.mkdir(BUCKET)
    s3.sent.clear()
    return f"s3://{BUCKET}/test-{next(_NUMBERS)}"


STORES = every_day(["memory"], more=[pytest.param("s3", marks=needs_s3)])


@pytest.fixture(params=STORES)
def bucket(request) -> str:
    """The URL of an empty folder in each store."""
    return request.getfixturevalue(f"{request.param}_bucket")
