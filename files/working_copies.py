"""Lets every reader and writer of folders work on object stores: by a local copy of a URL's folder.

A copy has the files of the store, but those with tensors are empty stand-ins of the right size:
`open_for_reading` reads their bytes from the store, range by range, and any other reader finds
zeros instead of a header and refuses them. A folder that is written is a copy, too, which `push`
sends to the store. So all that is above this floor sees local folders.

    find_source(name)    a URL's folder or file as a local copy to read; None for other names
    find_work(name)      the local copy of a URL to write, or the path itself
    pull(folder)         makes such a copy equal to the store
    push(folder)         makes the store equal to the copy

The last two do nothing for other folders. An object store renames nothing. Therefore a folder is
marked by an object `.incomplete` while it is sent, and readers refuse it then; and the files
that describe a model are removed first and sent last. The checkpoints of a run are sent one by
one, each with its state last: one without a state is none. A model within a run has a mark of its
own.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import sys
import threading
from bisect import bisect_right
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from .durable import write_durably
from .object_store import (
    PACKAGES,
    StoredObject,
    download,
    find_object,
    find_url,
    list_objects,
    read_range,
    read_ranges,
    remove_object,
    upload,
    write_object,
)
from .seekable import SeekableReader

VARIABLE = "SHARDZOO_OBJECTS"
DEFAULT = "~/.cache/shardzoo/objects"
INCOMPLETE = ".incomplete"
# Files that are read by ranges. Whoever reads them otherwise finds no header.
RANGED = frozenset((".safetensors",))
# A folder's files that say what is in it, in the order in which they are sent, after all others.
CONFIGS = ("config.json", "adapter_config.json")
STATE = "trainer_state.json"
# The index of a folder of torch.distributed.checkpoint, which is no hidden file of another program.
INDEX = ".metadata"
LAST = (*CONFIGS, INDEX, "corpus.json", "manifest.json", STATE)
# In the names of a run's checkpoints that it has left behind: they stay on the machine that found it.
ABANDONED = ".abandoned"
RECORD = "objects.json"
_ONE_SLASH = re.compile(rf"(?<![\w/.:-])({'|'.join(PACKAGES)}):/(?=[^/\s])")
STREAM_BLOCK = 1 << 20  # bytes that are read ahead of whoever reads in order
SHORT_GAP = 64 << 10  # bytes between two ranges that one request reads
LARGEST_TEXT = 16 << 20  # bytes of a file that whoever replaces a folder may look at
PENDING = "pending"


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file of a local copy.

    Attributes:
        version: That of the object that it is a copy of.
        size: Bytes.
        mtime_ns: The modification time of the local file, by which a change of it is noticed.
        is_whole: Whether the file has the object's bytes; if not, it is a stand-in.
    """

    version: str
    size: int
    mtime_ns: int
    is_whole: bool

    def fits(self, path: Path) -> bool:
        """Returns whether a local file is as it was when this was recorded."""
        try:
            found = path.stat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class WorkingCopy:
    """The local copy of a URL's folder, or of one object.

    Attributes:
        home: The folder that holds the copy and its record.
        url: The URL.
        path: The copy.
    """

    home: Path
    url: str

    @property
    def path(self) -> Path:
        return self.home / PurePosixPath(self.url).name

    @classmethod
    def from_url(cls, url: str, use: str) -> WorkingCopy:
        """Returns the copy of a URL for a use, "read" or "write"; the same in every process."""
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        return cls(_find_root() / use / digest, url)

    @classmethod
    def find(cls, path: Path) -> WorkingCopy | None:
        """Returns the copy that a local path belongs to, or None."""
        root = _find_root()
        text = os.fspath(path)
        if not text.startswith(f"{root}{os.sep}"):
            return None
        home = root.joinpath(*Path(text).relative_to(root).parts[:2])
        try:
            return cls(home, (home / "url").read_text())
        except OSError:
            return None

    @classmethod
    def find_whole(cls, path: Path) -> WorkingCopy | None:
        """Returns the copy that a local path is, or None: also for a path within a copy.

        A folder within a run's copy is sent with the run.
        """
        copy = cls.find(path)
        return copy if copy is not None and copy.path == path else None

    def make(self) -> None:
        """Makes the folder that holds the copy."""
        self.home.mkdir(parents=True, exist_ok=True)
        if not (self.home / "url").exists():
            write_durably(self.home / "url", self.url)

    def read_record(self) -> dict[str, FileRecord]:
        try:
            content = json.loads((self.home / RECORD).read_bytes())
        except FileNotFoundError:
            return {}
        return {name: FileRecord(**values) for name, values in content.items()}

    def write_record(self, record: Mapping[str, FileRecord]) -> None:
        values = {name: asdict(entry) for name, entry in sorted(record.items())}
        write_durably(self.home / RECORD, json.dumps(values))

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lets one process at a time change the copy."""
        with open(self.home / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def local(self, name: str) -> Path:
        return self.path / name if name else self.path

    def remote(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _find_root() -> Path:
    """Returns the folder of all local copies, without links, which paths that are resolved have."""
    named = os.environ.get(VARIABLE) or DEFAULT
    return Path(os.path.realpath(os.path.expanduser(named)))


# ----------------------------------------------------------------------------------------- reading


def find_source(
    name: str | os.PathLike[str],
    patterns: Sequence[str] = ("*",),
    *,
    largest: int = sys.maxsize,
    ranged: Collection[str] = RANGED,
) -> Path | None:
    """Returns a local copy of a URL, to read; None for any other name.

    Args:
        name: A URL or a path.
        patterns: The names of the files that are needed, in any folder, or paths relative to the
            URL.
        largest: Bytes of a file that is fetched; larger ones are stand-ins.
        ranged: Endings of other files that are stand-ins.

    Raises:
        ValueError: There is nothing at the URL, or a folder that is not complete.
        OSError: The store cannot be reached, or refuses.
    """
    url = find_url(name)
    if url is None:
        return None
    copy = WorkingCopy.from_url(url, "read")
    objects = list_objects(url)
    if not objects:
        raise ValueError(f"there is nothing at {url}")
    _refuse_incomplete(url, objects)
    objects = _drop_unfinished(objects)
    wanted: dict[str, StoredObject] = {}
    for path, found in objects.items():
        file = PurePosixPath(path).name
        if not path or path in patterns or any(fnmatch(file, pattern) for pattern in patterns):
            wanted[path] = found
    copy.make()
    with copy.locked():
        _remove_others(copy, objects)
        _update(copy, wanted, largest, ranged)
    return copy.path


def _refuse_incomplete(url: str, objects: Iterable[str]) -> None:
    if INCOMPLETE in objects:
        raise ValueError(
            f"{url} is not complete: it is being written, or its writing was interrupted; repeat "
            f"the command that writes it, or remove it"
        )


def _drop_unfinished(objects: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
    """Returns the objects without those of checkpoints that have no state, and without marks."""
    kept: dict[str, StoredObject] = {}
    for name, found in objects.items():
        path = PurePosixPath(name)
        in_checkpoint = path.parent.parent.name == "checkpoints"
        if _is_hidden(name) or (in_checkpoint and str(path.parent / STATE) not in objects):
            continue
        kept[name] = found
    return kept


def _remove_others(copy: WorkingCopy, objects: Collection[str]) -> None:
    """Removes the files of the copy that the store does not have."""
    record = copy.read_record()
    for name in _list_files(copy.path):
        if name not in objects:
            copy.local(name).unlink()
            record.pop(name, None)
    copy.write_record(record)
    for path in sorted(copy.path.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):
                path.rmdir()


def _update(
    copy: WorkingCopy,
    objects: Mapping[str, StoredObject],
    largest: int = sys.maxsize,
    ranged: Collection[str] = RANGED,
) -> None:
    """Makes files of the copy equal to objects.

    Those of more than `largest` bytes, and those with an ending in `ranged`, are stand-ins.
    """
    record = copy.read_record()
    for name, found in objects.items():
        path = copy.local(name)
        known = record.get(name)
        is_whole = path.suffix not in ranged and found.size <= largest
        is_known = known is not None and known.version == found.version and known.fits(path)
        if known is not None and is_known and (known.is_whole or not is_whole):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            if is_whole:
                download(copy.remote(name), partial)
            else:
                with partial.open("wb") as file:
                    file.truncate(found.size)
            os.utime(partial, ns=(found.mtime_ns, found.mtime_ns))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        record[name] = FileRecord(found.version, found.size, found.mtime_ns, is_whole)
    copy.write_record(record)


class RangedFile:
    """An object of a store that is read by ranges.

    Attributes:
        path: Its stand-in.
        state: Bytes, and the modification time of the stand-in, as `read_file_state` returns them.
    """

    def __init__(self, path: Path, url: str, record: FileRecord) -> None:
        self.path = path
        self.state = (record.size, record.mtime_ns)
        self._url = url
        self._version = record.version

    def read(self, start: int, stop: int) -> bytes:
        """Returns bytes [start, stop), fewer at the end of the object."""
        stop = min(stop, self.state[0])
        if start >= stop:
            return b""
        kept = self._find_kept()
        if kept is not None and kept.has(start, stop):
            return kept.read(start, stop)
        data = read_range(self._url, start, stop)
        if kept is not None:
            kept.add(start, data)
        return data

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes of several ranges, in the order of their bytes, which are asked for at
        once. Short gaps between them are read too: a request costs more than their bytes.
        """
        kept = self._find_kept()
        if kept is not None and all(kept.has(start, stop) for start, stop in ranges):
            return [kept.read(start, stop) for start, stop in ranges]
        spans: list[list[int]] = []
        for start, stop in ranges:
            if spans and 0 <= start - spans[-1][1] <= SHORT_GAP:
                spans[-1][1] = stop
            else:
                spans.append([start, stop])
        found = read_ranges(self._url, [(start, stop) for start, stop in spans])
        firsts = [start for start, _ in spans]
        pieces: list[bytes] = []
        for start, stop in ranges:
            place = bisect_right(firsts, start) - 1
            origin = firsts[place]
            pieces.append(found[place][start - origin : stop - origin])
        return pieces

    def _find_kept(self) -> KeptBytes | None:
        if _kept is None:
            return None
        with _keeping:
            key = (self.path, self._version)
            if key not in _kept:
                _kept[key] = KeptBytes()
            return _kept[key]

    def check_unchanged(self) -> None:
        """Raises ValueError if the object is no longer the one whose header was read."""
        found = find_object(self._url)
        if found is None or found.version != self._version:
            raise ValueError(f"{self._url} changed while it was being read; begin again")


class KeptBytes:
    """Bytes of an object that were read, in a temporary file without a name."""

    def __init__(self) -> None:
        self._file = TemporaryFile(dir=_find_root())  # noqa: SIM115 - closed with the object
        self._lock = threading.Lock()
        self._spans: list[tuple[int, int]] = []  # sorted; none touches another

    def has(self, start: int, stop: int) -> bool:
        place = bisect_right(self._spans, (start, sys.maxsize)) - 1
        return place >= 0 and self._spans[place][1] >= stop

    def read(self, start: int, stop: int) -> bytes:
        return os.pread(self._file.fileno(), stop - start, start)

    def add(self, start: int, data: bytes) -> None:
        os.pwrite(self._file.fileno(), data, start)
        stop = start + len(data)
        with self._lock:
            apart: list[tuple[int, int]] = []
            for first, last in self._spans:
                if last < start or first > stop:
                    apart.append((first, last))
                else:
                    start = min(start, first)
                    stop = max(stop, last)
            self._spans = sorted([*apart, (start, stop)])


_kept: dict[tuple[Path, str], KeptBytes] | None = None
_keeping = threading.Lock()


@contextmanager
def keeping_bytes() -> Generator[None]:
    """Sends the bytes of an object once to this process, though they are read several times: for
    their digest, and for a rank's part of them.
    """
    global _kept
    before = _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = before


OpenFile = int | RangedFile


def open_for_reading(path: Path) -> OpenFile:
    """Opens a file for `read_at`: a descriptor, or of a stand-in the object of the store."""
    stand_in = find_stand_in(path)
    if stand_in is not None:
        return stand_in
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def is_copy(path: Path) -> bool:
    """Returns whether a path is a local copy of a URL, or within one: its files may be stand-ins."""
    return WorkingCopy.find(path) is not None


def fetch_whole(path: Path) -> Path:
    """Returns a path, whose files have all their bytes on this machine, if it is a local copy of a URL.

    Programs that do not read by ranges need them.
    """
    copy = WorkingCopy.find(path)
    if copy is not None:
        find_source(copy.url, ranged=())
    return path


def find_stand_in(path: Path) -> RangedFile | None:
    """Returns the object whose stand-in a path is, or None for a file with bytes of its own."""
    copy = WorkingCopy.find(path)
    if copy is None:
        return None
    name = "" if path == copy.path else path.relative_to(copy.path).as_posix()
    record = copy.read_record().get(name)
    if record is None or record.is_whole or not record.fits(path):
        return None
    return RangedFile(path, copy.remote(name), record)


class _RangedStream(SeekableReader):
    """Reads an object of a store in order."""

    def __init__(self, file: RangedFile) -> None:
        super().__init__()
        self._file = file

    def _find_size(self) -> int:
        return self._file.state[0]

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._file.read(self._position, self._position + len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.check_unchanged()
        super().close()


def open_to_read(path: Path) -> BinaryIO:
    """Opens a file to be read in order; of a stand-in the object of the store, a block at a time."""
    stand_in = find_stand_in(path)
    if stand_in is None:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(_RangedStream(stand_in), STREAM_BLOCK))


def read_at(file: OpenFile, start: int, count: int) -> bytes:
    """Returns bytes of an open file, fewer at its end."""
    if isinstance(file, RangedFile):
        return file.read(start, start + count)
    return os.pread(file, count, start)


def close_file(file: OpenFile) -> None:
    if not isinstance(file, RangedFile):
        os.close(file)


# ----------------------------------------------------------------------------------------- writing


def find_work(name: str | os.PathLike[str]) -> Path:
    """Returns the local copy of a URL to write, or the path that the name is.

    Every process gets the same. The copy is empty until `pull`.
    """
    url = find_url(name)
    if url is None:
        return Path(name)
    copy = WorkingCopy.from_url(url, "write")
    copy.make()
    return copy.path


def pull(folder: Path, *, largest: int = LARGEST_TEXT, unless: str = "") -> None:
    """Makes a copy to write equal to the store, except for what a push that was cut has not sent.

    Does nothing for other folders.

    Args:
        folder: The copy.
        largest: Bytes of a file that is fetched; larger ones are stand-ins.
        unless: A file of the copy by which another process says that it uses the copy.
    """
    copy = WorkingCopy.find_whole(folder)
    if copy is None:
        return
    with copy.locked():
        if (copy.home / PENDING).exists() or (unless and copy.local(unless).exists()):
            return
        objects = list_objects(copy.url)
        if INCOMPLETE in objects:
            objects = {}  # What another machine has left is nothing; a push replaces it.
        objects = _drop_unfinished(objects)
        _remove_others(copy, objects)
        _update(copy, objects, largest)


def mark_pending(folder: Path) -> None:
    """Notes that a copy is about to have what the store does not, so that `pull` keeps it until it is
    sent.
    """
    copy = WorkingCopy.find_whole(folder)
    if copy is not None:
        write_durably(copy.home / PENDING, "")


def push(folder: Path, *, at_once: bool = True) -> None:
    """Makes the store equal to a copy. Does nothing for other folders.

    Args:
        folder: The copy.
        at_once: Whether readers shall find all of it or nothing; if not, it is a run's folder,
            whose checkpoints are complete one by one.

    Raises:
        OSError: The store cannot be reached, or refuses.
    """
    copy = WorkingCopy.find_whole(folder)
    if copy is None:
        return
    with copy.locked():
        _push(copy, at_once=at_once)
        (copy.home / PENDING).unlink(missing_ok=True)


def _push(copy: WorkingCopy, *, at_once: bool) -> None:
    record = copy.read_record()
    objects = list_objects(copy.url)
    files = [name for name in _list_files(copy.path) if ABANDONED not in name]
    stand_ins = {(entry.size, entry.mtime_ns) for entry in record.values() if not entry.is_whole}
    changed: list[str] = []
    for name in files:
        entry = record.get(name)
        is_known = entry is not None and name in objects and entry.version == objects[name].version
        if entry is not None and is_known and entry.fits(copy.local(name)):
            continue
        found = copy.local(name).stat()
        # A stand-in that was renamed has no bytes to send.
        if (found.st_size, found.st_mtime_ns) not in stand_ins:
            changed.append(name)
    # In a folder that this machine has not marked, what came after its last look is another's.
    owns_all = not at_once or INCOMPLETE in objects
    stale: list[str] = []
    for name in objects:
        if name not in files and not _is_hidden(name) and (owns_all or name in record):
            stale.append(name)
    marks: set[str] = set()
    for name in (*changed, *stale):
        folder = "." if at_once else _find_model(name, files)
        if folder is not None:
            marks.add(str(PurePosixPath(folder, INCOMPLETE)))
    for mark in sorted(marks):
        write_object(copy.remote(mark), b"")

    # What describes the files goes before they are replaced, and comes when all of them have.
    replaced = {PurePosixPath(name).parent for name in changed if not _rank(name)}
    for name in sorted(objects, key=_rank, reverse=True):
        is_state = name in changed and PurePosixPath(name).name == STATE
        if (at_once and _rank(name) and name in (*changed, *stale)) or (
            is_state and PurePosixPath(name).parent in replaced
        ):
            remove_object(copy.remote(name))
    for name in sorted(changed, key=lambda name: (_rank(name), name)):
        record[name] = _send(copy, name)
        copy.write_record(record)
    for name in sorted(stale, key=_rank, reverse=True):
        remove_object(copy.remote(name))
        record.pop(name, None)
    copy.write_record(record)
    marks.update(name for name in objects if PurePosixPath(name).name == INCOMPLETE)
    for mark in sorted(marks):
        remove_object(copy.remote(mark))


def _find_model(name: str, files: Sequence[str]) -> str | None:
    """Returns the folder of a model that a file within a run belongs to, such as "hf"; None for other
    files, and for those of checkpoints, which their states complete.
    """
    for folder in PurePosixPath(name).parents:
        if str(folder / STATE) in files:
            return None
        if str(folder) != "." and any(str(folder / config) in files for config in CONFIGS):
            return str(folder)
    return None


def push_files(prefix: Path, endings: Sequence[str]) -> None:
    """Sends the files whose names are a prefix and an ending. Does nothing if the prefix is not that
    of local copies.

    The last file says that the others are there: it is removed first, and sent last.
    """
    copy = WorkingCopy.find_whole(prefix)
    if copy is None:
        return
    remove_object(f"{copy.url}{endings[-1]}")
    for ending in endings:
        path = Path(f"{prefix}{ending}")
        if path.exists():
            upload(path, f"{copy.url}{ending}")
        else:
            remove_object(f"{copy.url}{ending}")


def _rank(name: str) -> int:
    """Returns the place of a file in the order of sending; 0 for all that describe nothing."""
    last = PurePosixPath(name).name
    return LAST.index(last) + 1 if last in LAST else 0


def _send(copy: WorkingCopy, name: str) -> FileRecord:
    path = copy.local(name)
    before = path.stat()  # A log may grow while it is sent; then it is sent again the next time.
    upload(path, copy.remote(name))
    found = find_object(copy.remote(name))
    version = found.version if found is not None else ""
    return FileRecord(version, before.st_size, before.st_mtime_ns, is_whole=True)


def _list_files(folder: Path) -> list[str]:
    """Returns the names of a folder's files relative to it, without hidden ones; "" for a file."""
    if folder.is_file():
        return [""]
    names: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not _is_hidden(name) and path.is_file():
            names.append(name)
    return names


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part != INDEX for part in PurePosixPath(name).parts)


@contextmanager
def writing(name: str | os.PathLike[str]) -> Generator[Path]:
    """Yields the folder to write: that of a path, or the local copy of a URL, which is sent at the
    end.
    """
    if find_url(name) is None:
        yield Path(name)
        return
    folder = find_work(name)
    pull(folder)
    yield folder
    push(folder)


@contextmanager
def naming_urls() -> Generator[None]:
    """Lets errors name URLs instead of the paths of their local copies."""
    try:
        yield
    except (OSError, ValueError) as error:
        error.args = tuple(
            name_urls(part) if isinstance(part, str) else part for part in error.args
        )
        raise


def locate(path: str | os.PathLike[str]) -> Path:
    """Returns where a path, a URL or a local copy leads, so that two of them can be compared."""
    url = find_url(path)
    if url is not None:
        return Path(url)
    return Path(name_urls(str(Path(path).resolve())))


def name_urls(text: str) -> str:
    """Returns a message with URLs in the place of the paths of their local copies, and with both
    slashes of URLs that were paths.
    """
    text = _ONE_SLASH.sub(r"\1://", text)
    root = str(_find_root())
    if root not in text:
        return text
    for found in dict.fromkeys(
        re.findall(rf"{re.escape(root)}/(?:read|write)/[0-9a-f]{{16}}", text)
    ):
        copy = WorkingCopy.find(Path(found, "x"))
        if copy is not None:
            text = text.replace(str(copy.path), copy.url).replace(found, copy.url)
    return text
