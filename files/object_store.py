"""Reaches object stores, such as `s3://bucket/name`, by fsspec; every failure is one line.

fsspec and the packages of the stores are the clients: s3fs for `s3://`, gcsfs for `gs://`, adlfs
for `abfs://`, huggingface_hub for `hf://`. `memory://` is a store within this process.
"""

# (fsspec leaves its types open)
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from .s3_upload import upload_in_parts

# The package that each store needs, and the extra of shardzoo that installs it.
PACKAGES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "az": ("adlfs", "azure"),
    "hf": ("huggingface_hub", ""),
    "memory": ("fsspec", ""),
}
STORES = "s3://, gs://, abfs://, hf:// or memory://"
# Path("s3://bucket/name") has one slash: the slashes of a URL do not survive in a Path.
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):/+(?P<rest>.*)", re.DOTALL)
# A name that means a store, also without its second slash. A scheme of one letter means none.
_SCHEME = re.compile(r"[a-z][a-z0-9+-]+")
PART_BYTES = 5 << 20  # of an upload; the least that S3 takes
SECONDS_TO_ANSWER = 180
MOST_PARTS = 9_000  # S3 allows 10,000
# The packages whose errors are a store's, whatever their classes.
_CLIENTS = frozenset(
    (
        "aiobotocore",
        "aiohttp",
        "azure",
        "botocore",
        "fsspec",
        "gcsfs",
        "google",
        "httpx",
        "huggingface_hub",
        "requests",
        "s3fs",
    )
)
_filesystems: dict[tuple[int, str], Any] = {}


def find_url(name: str | os.PathLike[str]) -> str | None:
    """Returns the URL that a name is, or None for the path of a file or folder.

    Raises:
        ValueError: It is the URL of no store.
    """
    text = os.fspath(name)
    match = _URL.fullmatch(text)
    if match is None:
        if text.removesuffix(":") in PACKAGES and text.endswith(":"):  # Path("s3://")
            raise ValueError(f"{text}// names no bucket or folder; write {text}//BUCKET/NAME")
        return None
    scheme = match["scheme"]
    if scheme not in PACKAGES:
        is_folder = os.path.lexists(f"{scheme}:") or _SCHEME.fullmatch(scheme) is None
        if "://" not in text and is_folder:
            return None
        raise ValueError(
            f"{scheme}://{match['rest']}: there is no store {scheme}://; use {STORES}, or a path"
        )
    rest = match["rest"].rstrip("/")
    if not rest:
        raise ValueError(f"{text} names no bucket or folder; write {scheme}://BUCKET/NAME")
    return f"{scheme}://{rest}"


def check_local(path: str | os.PathLike[str], argument: str) -> None:
    """Raises ValueError if the path of a file that is written on this machine is a URL."""
    url = find_url(path)
    if url is not None:
        raise ValueError(f"{argument} must be a path on this machine, not {url}")


@dataclass(frozen=True)
class StoredObject:
    """An object of a store.

    Attributes:
        size: Bytes.
        version: Text that differs when the object was written again.
    """

    size: int
    version: str

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> StoredObject:
        """Reads what fsspec says of an object; each store has names of its own for its version."""
        names = (
            "ETag",
            "etag",
            "md5Hash",
            "blob_id",
            "LastModified",
            "mtime",
            "updated",
            "created",
        )
        version = next((info[name] for name in names if info.get(name)), "")
        if isinstance(version, datetime):
            version = version.timestamp()
        return cls(int(info["size"] or 0), str(version))

    @property
    def mtime_ns(self) -> int:
        """A modification time for the object's local file, which only this version has.

        It is a whole second, which every file system keeps.
        """
        digest = hashlib.sha256(self.version.encode()).hexdigest()
        return int(digest[:8], 16) % (1 << 31) * 10**9


def list_objects(url: str) -> dict[str, StoredObject]:
    """Returns the objects below a URL by their names relative to it.

    An object of just this URL has the name "".

    Raises:
        OSError: The store cannot be reached, or refuses. There is no bucket.
    """
    with _one_line(url):
        filesystem = _open_store(url)
        _forget_listings(filesystem, url)
        root = _strip(filesystem, url)
        answer: Any = filesystem.find(root, detail=True)
        # adlfs answers with a list of one name, or of none.
        is_list = isinstance(answer, list)
        found: dict[str, Any] = dict.fromkeys(cast(list[str], answer)) if is_list else answer
        objects: dict[str, StoredObject] = {}
        for name, info in found.items():
            relative = _strip(filesystem, name).removeprefix(root)
            if relative and not relative.startswith("/"):
                continue  # Its name only begins like the folder's.
            info = info or filesystem.info(name)
            if info["type"] == "file":
                objects[relative.lstrip("/")] = StoredObject.from_info(info)
        return objects


def find_object(url: str) -> StoredObject | None:
    """Returns the object of a URL, or None if there is none."""
    with _one_line(url):
        filesystem = _open_store(url)
        _forget_listings(filesystem, url)
        try:
            info = filesystem.info(_strip(filesystem, url))
        except FileNotFoundError:
            return None
        return StoredObject.from_info(info) if info.get("type") == "file" else None


def read_object(url: str) -> bytes:
    """Returns the bytes of a small object."""
    with _one_line(url):
        filesystem = _open_store(url)
        return filesystem.cat_file(_strip(filesystem, url))


def read_range(url: str, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop) of an object."""
    with _one_line(url):
        filesystem = _open_store(url)
        options = _range_options(url)
        return filesystem.cat_file(_strip(filesystem, url), start=start, end=stop, **options)


def read_ranges(url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns the bytes of several ranges [start, stop) of an object, which are asked for at once."""
    with _one_line(url):
        filesystem = _open_store(url)
        starts = [start for start, _ in ranges]
        stops = [stop for _, stop in ranges]
        paths = [_strip(filesystem, url)] * len(ranges)
        options = _range_options(url)
        return filesystem.cat_ranges(paths, starts, stops, on_error="raise", **options)


def write_object(url: str, content: bytes, *, create: bool = False) -> None:
    """Writes a small object.

    Args:
        create: Whether to refuse to replace one.

    Raises:
        FileExistsError: It exists, with `create`.
    """
    with _one_line(url):
        filesystem = _open_store(url)
        path = _strip(filesystem, url)
        if create:
            filesystem.pipe_file(path, content, mode="create")
        else:
            filesystem.pipe_file(path, content)


def upload(file: Path, url: str) -> None:
    """Copies a file to a store, in parts, so that memory does not grow with it.

    The object appears when the last part has arrived. An upload that is cut leaves none.
    """
    with _one_line(url):
        filesystem = _open_store(url)
        path = _strip(filesystem, url)
        size = file.stat().st_size
        part_bytes = max(PART_BYTES, size // MOST_PARTS)
        if url.startswith("s3") and size > part_bytes:
            upload_in_parts(filesystem, file, path, part_bytes)
        elif url.startswith(("gs", "gcs")):
            filesystem.put_file(str(file), path, chunksize=part_bytes)
        else:
            filesystem.put_file(str(file), path)


def download(url: str, file: Path) -> None:
    """Copies an object to a file, a block at a time."""
    with _one_line(url):
        filesystem = _open_store(url)
        filesystem.get_file(_strip(filesystem, url), str(file))


def remove_object(url: str) -> None:
    """Removes an object, if it exists."""
    with _one_line(url):
        filesystem = _open_store(url)
        try:
            filesystem.rm_file(_strip(filesystem, url))
        except FileNotFoundError:
            return


def has_client() -> bool:
    """Returns whether this process has reached a store, so that the store's client is in memory."""
    return bool(_filesystems)


def _strip(filesystem: Any, url: str) -> str:
    """Returns the name that a store has for a URL."""
    return filesystem._strip_protocol(url)


def _forget_listings(filesystem: Any, url: str) -> None:
    """Lets the next question ask the store: the Hub's file system keeps listings in spite of
    `use_listings_cache=False`.
    """
    if url.startswith("hf"):
        filesystem.invalidate_cache()


def _range_options(url: str) -> dict[str, str]:
    """Returns what keeps a client from reading ahead: the Hub's would fetch 5 MiB more than asked."""
    return {"cache_type": "none"} if url.startswith("hf") else {}


def _open_store(url: str) -> Any:
    """Returns fsspec's file system of a URL. A process that was forked gets its own."""
    scheme = url.partition("://")[0]
    key = (os.getpid(), scheme)
    if key not in _filesystems:
        package, extra = PACKAGES[scheme]
        try:
            import fsspec  # pyright: ignore[reportMissingTypeStubs]

            options: dict[str, Any] = {}
            if scheme.startswith("s3"):
                # To put the parts of a large object together takes the server some time. A client
                # that gives up and asks again hears that there is no such upload.
                options["config_kwargs"] = {"read_timeout": SECONDS_TO_ANSWER}
            # Listings must be those of now: other machines write there.
            _filesystems[key] = fsspec.filesystem(scheme, use_listings_cache=False, **options)
        except ImportError:
            wanted = f"'shardzoo[{extra}]'" if extra else package
            raise ValueError(f"{url} needs the package {package}: pip install {wanted}") from None
    return _filesystems[key]


@contextmanager
def _one_line(url: str) -> Generator[None]:
    """Turns what the clients raise into an OSError that says in one line what is wrong."""
    try:
        yield
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "the object exists", url) from None
    except FileNotFoundError as error:
        reason = (
            _first_line(error) if "bucket does not" in str(error) else "there is no such object"
        )
        raise FileNotFoundError(errno.ENOENT, reason, url) from None
    except Exception as error:
        module = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and module not in _CLIENTS:
            raise
        number = getattr(error, "errno", None) or errno.EIO
        raise OSError(number, _explain(error), url) from None


def _explain(error: BaseException) -> str:
    """Returns one line on a client's error."""
    kind = type(error).__name__
    text = _first_line(error)
    if "NoCredentials" in kind or "NoAuth" in kind:
        return "the store has no credentials; set those of its client, such as AWS_ACCESS_KEY_ID"
    if isinstance(error, PermissionError):
        return f"the store refuses access ({text}); check the credentials and the bucket's policy"
    if "Connect" in kind or "Timeout" in kind or isinstance(error, TimeoutError):
        return f"the store cannot be reached: {text}"
    return f"the store failed: {text}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.splitlines()[0]
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__
