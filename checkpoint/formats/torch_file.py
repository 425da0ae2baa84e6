"""Finds the tensors in a file written by `torch.save`. No code in the file runs.

Pickled objects are read with `weights_only=True`. Tensors get no storage, but each records the position of its bytes in
the file. An `argparse.Namespace` becomes `SavedArguments`, and other objects that training frameworks save next to the
weights become a `PlaceholderObject`; all other classes are refused.
"""

# (torch leaves the types of its unpickler and of its safe globals open)
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import bisect
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import torch
from torch import _weights_only_unpickler
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ..dtypes import from_torch_name
from ..stored_tensor import StoredTensor

# Largest size of the pickles that describe the tensors, about 250 bytes for each. It bounds the time and the memory.
LARGEST_PICKLE = 4 << 20
LARGEST_DIRECTORY = 16 << 20  # bytes of the zip format's list of records, about 70 bytes for each

# Classes of objects that are saved next to the weights: random states, loss scalers, values of arguments.
PLACEHOLDER_TYPES = (
    "_io.BytesIO",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "fp16.loss_scaler.DynamicLossScaler",
    "fp16.loss_scaler.LossScaler",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.legacy.model.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.model.enums.PositionEmbeddingType",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
    "signal.Signals",
)

Scalar = bool | int | float | str | None
PlainValue = Scalar | tuple[Scalar, ...]
PLAIN_TYPES = (bool, int, float, str, type(None))

_LOCAL_HEADER = struct.Struct(
    "<26xHH"
)  # of a zip record: the lengths of its name and of its extra field
_END = struct.Struct("<4s8xL6x")  # of a zip file: signature and bytes of its directory
_WIDE_END = struct.Struct("<4s36xQ8x")  # the same in the zip64 format
_LOCATOR = struct.Struct("<4s4xQ4x")  # where the zip64 end is

# Unpickling a bytearray allocates as much memory as its argument says. In a pickle, a newline follows its name.
_ALLOCATION = b"bytearray\n"

# Errors that torch raises for damaged pickles.
_DAMAGE = (
    RuntimeError, OSError, EOFError, LookupError, TypeError, AttributeError, ValueError, AssertionError, MemoryError,
    ArithmeticError, struct.error,
)  # fmt: skip


def load_without_storage(path: Path) -> Any:
    """Returns the object in the file, with tensors on the meta device. ValueError if it is damaged or needs code."""
    try:
        with _only_placeholder_types():
            if zipfile.is_zipfile(path):
                Records(
                    path
                )  # checks the file first, because torch.load crashes on tensors of the other byte order
                return torch.load(path, map_location="meta", mmap=True, weights_only=True)
            return _load_before_zip(path)
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        what = f"a {foreign[1]}" if foreign else "an object that needs code to load"
        raise ValueError(
            f"{path} is refused: besides tensors and plain values it holds {what}"
        ) from None
    except _DAMAGE as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise ValueError(
            reason if reason.startswith(str(path)) else f"{path} is damaged: {reason}"
        ) from None


def locate_tensors(path: Path, state: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """Returns the stored tensors of a state dictionary that `load_without_storage` read from `path`.

    Raises ValueError for other entries than tensors, and for tensors that are not contiguous, dense and complete.
    """
    records = Records(path) if zipfile.is_zipfile(path) else None
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{path}: {name!r} is a {type(tensor).__name__}, but weights are named tensors"
            )
        tensors[name] = _locate(path, name, tensor, records)
    return tensors


def _locate(path: Path, name: str, tensor: torch.Tensor, records: Records | None) -> StoredTensor:
    where = f"tensor {name} in {path}"
    if (
        tensor.is_sparse
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.layout != torch.strided
    ):
        raise ValueError(
            f"{where} is not a dense tensor but {tensor.layout}; save it after .to_dense()"
        )
    if tensor.numel() and not tensor.is_contiguous():
        raise ValueError(f"{where} is not contiguous; save it after .contiguous()")
    dtype = from_torch_name(str(tensor.dtype))
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if start is None and tensor.numel():
        raise ValueError(f"{where} has no bytes in the file")
    start = start or 0
    offset = start + int(tensor.storage_offset()) * tensor.element_size()
    stored = StoredTensor(name, path, dtype, tuple(tensor.shape), offset)
    stop = offset + stored.nbytes
    if tensor.numel() and not (
        records.contain(start, stop) if records else stop <= start + storage.nbytes()
    ):
        raise ValueError(f"{where} claims bytes outside its record of the file")
    return stored


def locate_saved_tensor(path: Path, name: str, start: int, length: int) -> StoredTensor:
    """Returns the tensor that `torch.save` wrote into `length` bytes of a file from byte `start` on, and nothing else.

    Raises ValueError if there is something else, or if the tensor is not contiguous, dense and complete.
    """
    where = f"tensor {name} in {path}"
    records = Records(path, (start, length))
    storages: dict[str, torch.TypedStorage] = {}
    unpickler: Any = _weights_only_unpickler.Unpickler(
        io.BytesIO(records.pickled), encoding="utf-8"
    )
    unpickler.persistent_load = partial(_stored_in_zip, storages=storages)
    try:
        with _only_placeholder_types():
            tensor = unpickler.load()
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        raise ValueError(
            f"{where} is refused: {str(error).splitlines()[0] if str(error) else repr(error)}"
        ) from None
    if not isinstance(tensor, torch.Tensor) or len(storages) != 1:
        raise ValueError(f"{where} is a {type(tensor).__name__}, not one tensor")
    begin = records.named.get(f"data/{next(iter(storages))}")
    if begin is not None:
        cast(Any, tensor.untyped_storage())._checkpoint_offset = begin
    return _locate(path, name, tensor, records)


class Window(io.RawIOBase):
    """Reads a range of a file as if it were a whole file."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = path.open("rb"), start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("it points before its beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


class Records:
    """The positions of the records in a zip file. ValueError if `torch.save` would not write such a file.

    `window` is the first byte and the length of a zip file within the file; by default it is the whole file.

    Attributes:
        named: Name of a record, without that of its folder -> its first byte in the file.
        pickled: The contents of `data.pkl`.
    """

    def __init__(self, path: Path, window: tuple[int, int] | None = None) -> None:
        self._stops: dict[int, int] = {}
        self.named: dict[str, int] = {}
        self.pickled = b""
        base, length = window or (0, path.stat().st_size)
        try:
            with Window(path, base, length) as raw, io.BufferedReader(raw) as file:
                _check_directory(path, file)
                with zipfile.ZipFile(file) as archive:
                    for info in archive.infolist():
                        self._add(path, archive, info)
                        file.seek(info.header_offset)
                        name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                        start = base + info.header_offset + _LOCAL_HEADER.size + name + extra
                        self._stops[start] = start + info.file_size
                        self.named[info.filename.partition("/")[2]] = start
        except (
            zipfile.BadZipFile,
            struct.error,
            OSError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        self._size = min(base + length, path.stat().st_size)
        self._starts = sorted(self._stops)

    def _add(self, path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{path} is compressed, which torch.save does not do")
        if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
            raise ValueError(f"{path} was written on a big-endian machine")
        if info.filename.endswith("/data.pkl"):
            if info.file_size > LARGEST_PICKLE:
                raise ValueError(
                    f"{path} has {info.file_size:,} pickled bytes, but at most {LARGEST_PICKLE:,} are read"
                )
            self.pickled = archive.read(info)
            if _ALLOCATION in self.pickled:
                raise ValueError(
                    f"{path} is refused: besides tensors and plain values it holds a bytearray"
                )

    def contain(self, start: int, stop: int) -> bool:
        """Returns whether a record starts at byte `start` and reaches at least to byte `stop`."""
        position = bisect.bisect_right(self._starts, start) - 1
        return (
            position >= 0
            and self._starts[position] == start
            and stop <= min(self._stops[start], self._size)
        )


def _check_directory(path: Path, file: BinaryIO) -> None:
    """Raises ValueError if listing the records would take too much memory."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    signature, length = _END.unpack(file.read(_END.size))
    if signature != b"PK\5\6":
        raise ValueError(
            f"{path} has bytes after the end of its zip format, which torch.save does not write"
        )
    if length == 0xFFFFFFFF:
        file.seek(max(0, size - _END.size - _LOCATOR.size))
        _, offset = _LOCATOR.unpack(file.read(_LOCATOR.size))
        file.seek(min(offset, size))
        _, length = _WIDE_END.unpack(file.read(_WIDE_END.size))
    if length > min(LARGEST_DIRECTORY, size):
        limit = min(LARGEST_DIRECTORY, size)
        raise ValueError(
            f"{path} lists its records in {length:,} bytes, but at most {limit:,} are allowed"
        )


@contextmanager
def _only_placeholder_types() -> Generator[None]:
    """Makes `torch.load` replace these types by `PlaceholderObject`, and refuse types that other libraries allowed."""
    allowed_by_others = cast(list[Any], torch.serialization.get_safe_globals())
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(PlaceholderObject, name) for name in PLACEHOLDER_TYPES])
    torch.serialization.add_safe_globals([(SavedArguments, "argparse.Namespace")])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed_by_others)


class PlaceholderObject:
    """Replaces an object whose contents are not needed. It accepts and ignores all arguments and state."""

    def __new__(cls, *args: object, **kwargs: object) -> PlaceholderObject:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class SavedArguments(PlaceholderObject):
    """Replaces an `argparse.Namespace`: its plain values by name. Values of other types are left out."""

    values: Mapping[str, PlainValue] = MappingProxyType({})

    def __setstate__(self, state: object) -> None:
        self.values = self.plain(cast(dict[Any, Any], state)) if isinstance(state, dict) else {}

    @staticmethod
    def plain(state: Mapping[Any, Any]) -> dict[str, PlainValue]:
        """Returns the entries with plain values, and lists of such as tuples."""
        found: dict[str, PlainValue] = {}
        for name, value in state.items():
            if type(name) is str and type(value) in PLAIN_TYPES:
                found[name] = value
            elif (
                type(name) is str
                and type(value) in (list, tuple)
                and all(type(entry) in PLAIN_TYPES for entry in value)
            ):
                found[name] = tuple(value)
        return found


def _load_before_zip(path: Path) -> Any:
    """Loads the format from before torch 1.6: five pickles, then the length and the bytes of each storage.

    The pickles are a magic number, a version, facts about the machine, the objects, and the order of the storages.
    """
    with path.open("rb") as file:
        pickled = _PickledPart(file)
        try:
            magic = _weights_only_unpickler.load(pickled, encoding="utf-8")
        except (pickle.UnpicklingError, *_DAMAGE):
            magic = None
        if (
            magic != MAGIC_NUMBER
            or _weights_only_unpickler.load(pickled, encoding="utf-8") != PROTOCOL_VERSION
        ):
            raise ValueError(f"{path} is not in a format of torch.save, or it is truncated")
        machine = _weights_only_unpickler.load(pickled, encoding="utf-8")
        if (
            isinstance(machine, dict)
            and cast(dict[Any, Any], machine).get("little_endian") is False
        ):
            raise ValueError(f"{path} was written on a big-endian machine")
        storages: dict[str, torch.TypedStorage] = {}
        unpickler: Any = _weights_only_unpickler.Unpickler(pickled, encoding="utf-8")
        unpickler.persistent_load = partial(_meta_storage, storages=storages)
        state = unpickler.load()
        order = _weights_only_unpickler.load(pickled, encoding="utf-8")
        keys = [str(key) for key in cast(list[Any], order)] if isinstance(order, list) else None
        if keys is None or sorted(keys) != sorted(storages):
            raise ValueError(f"{path} does not list the storages that its tensors use")
        _place_storages(path, file, [storages[key] for key in keys])
    return state


class _PickledPart:
    """Reads the pickles at the start of a file. Raises ValueError if they are larger than `LARGEST_PICKLE`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, count: int) -> bytes:
        if self._file.tell() + count > LARGEST_PICKLE:
            raise ValueError(
                f"it has more than the {LARGEST_PICKLE:,} pickled bytes that are allowed"
            )
        return self._file.read(count)

    def readline(self) -> bytes:
        line = self._file.readline(LARGEST_PICKLE)
        if line == _ALLOCATION:
            raise pickle.UnpicklingError("GLOBAL bytearray")
        return line


def _meta_storage(saved: Any, storages: dict[str, torch.TypedStorage]) -> torch.TypedStorage:
    """Returns the storage that a persistent id of the old format names, on the meta device."""
    kind, storage_type, key, _, count, view = saved
    if kind not in ("storage", b"storage") or view is not None:
        raise ValueError("it contains views of storages, which only torch before 0.4 wrote")
    dtype = storage_type.dtype
    if str(key) not in storages:
        storage = torch.UntypedStorage(count * dtype.itemsize, device="meta")
        storages[str(key)] = torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return storages[str(key)]


def _stored_in_zip(saved: Any, storages: dict[str, torch.TypedStorage]) -> torch.TypedStorage:
    """Does the same for the zip format, whose persistent ids have no views."""
    return _meta_storage((*saved, None), storages)


def _place_storages(path: Path, file: BinaryIO, storages: list[torch.TypedStorage]) -> None:
    """Records the position of each storage's bytes. ValueError if the file and its pickle claim different lengths."""
    size = os.fstat(file.fileno()).st_size
    position = file.tell()
    for typed in storages:
        storage: Any = cast(Any, typed)._untyped_storage
        file.seek(position)
        (count,) = struct.unpack("<q", file.read(8))
        if count * typed.dtype.itemsize != storage.nbytes():
            raise ValueError(
                f"{path} has a storage of {count:,} elements, but its pickle claims {storage.nbytes():,} bytes"
            )
        storage._checkpoint_offset = position + 8
        position += 8 + storage.nbytes()
    if position != size:
        raise ValueError(f"{path} has {size:,} bytes, but its tensors end at {position:,}")
