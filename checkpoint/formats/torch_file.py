"""Reads, plans and names the files of `torch.save`. No code in a file runs.

Reading: pickled objects are read with `weights_only=True`. Tensors get no storage, but each records
the position of its bytes in the file. An `argparse.Namespace` becomes `SavedArguments`, and other
objects that training frameworks save next to the weights become a `PlaceholderObject`; all other
classes are refused.

Writing: a planned file has the zip format of `torch.save`. Its pickle refers only to the functions
that `torch.save` refers to, so `torch.load(weights_only=True)` and all tools that read such files
can load it.
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
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import torch
from torch import _utils, _weights_only_unpickler
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ...files.printable import describe
from ..dtypes import from_torch_name, item_size
from ..planned_file import PlannedFile
from ..stored_tensor import FileState, StoredTensor, StridedTensor, read_file_state
from .pickle_check import check_pickle

# The pickles describe each tensor in about 250 bytes. The limit bounds the time and the memory.
LARGEST_PICKLE = 4 << 20
# Bytes that an expanded tensor, which repeats those of the file, may have.
LARGEST_EXPANDED = 1 << 30
# Bytes of the zip format's list of records, which has about 70 bytes for each.
LARGEST_DIRECTORY = 16 << 20

# Classes of objects that are saved next to the weights: random states, loss scalers, values of
# arguments.
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

# Unpickling a bytearray allocates as much memory as its argument says. In a pickle, a newline
# follows its name.
_ALLOCATION = b"bytearray\n"

# Errors that torch raises for damaged pickles.
_DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    AssertionError,
    MemoryError,
    ArithmeticError,
    struct.error,
)

# The parts of zip files that are read; fields without use are skipped.
_LOCAL_NAME_LENGTHS = struct.Struct("<26xHH")  # of a record: bytes of its name, of its extra field
_END_DIRECTORY = struct.Struct("<4s8xL6x")  # of the file: signature, bytes of its directory
_WIDE_END_DIRECTORY = struct.Struct("<4s36xQ8x")  # the same in the zip64 format
_LOCATOR_OFFSET = struct.Struct("<4s4xQ4x")  # signature, first byte of the zip64 end

# The parts of zip files that are written, with all fields.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3L5H2L")
_WIDE_SIZES = struct.Struct("<2HQQ")  # the zip64 field of a local header: id, length, two sizes
_WIDE_SIZES_AND_OFFSET = struct.Struct("<2HQQQ")  # that of a central header, with the offset
_WIDE_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_IN_WIDE_FIELD = 0xFFFFFFFF  # means that the zip64 field has the number
# January 1, 1980, the earliest date of the zip format: equal contents give equal bytes.
_FIRST_DATE = 0x21
_ZIP_VERSION = 45  # 4.5, the first with zip64
_LOCAL_CHECKSUM_AT = 14  # byte of a local header
_CENTRAL_CHECKSUM_AT = 16  # byte of a central header
_RECORD_ALIGNMENT = 64  # bytes
_PADDING_FIELD = 0x4246  # id of an extra field that readers skip, "FB"
_ROOT = "archive"  # the folder that all records of a planned file are in

# Safetensors' name of a type -> the class that a torch file names for it.
_STORAGES = {
    "F64": torch.DoubleStorage,
    "F32": torch.FloatStorage,
    "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage,
    "I64": torch.LongStorage,
    "I32": torch.IntStorage,
    "U8": torch.ByteStorage,
    "BOOL": torch.BoolStorage,
}
_REBUILD_TENSOR = cast(Any, _utils)._rebuild_tensor_v2  # the function that torch.save names


# ---------------------------------------------------------------------------------------- reading


def load_without_storage(path: Path) -> Any:
    """Returns the object in a file, with its tensors on the meta device.

    Raises:
        ValueError: The file is damaged, or loading it needs code.
    """
    try:
        with _only_placeholder_types():
            if zipfile.is_zipfile(path):
                # This checks the file first: torch.load crashes on tensors of the other byte order.
                ZipRecords(path)
                return torch.load(path, map_location="meta", mmap=True, weights_only=True)
            return _load_before_zip(path)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {_explain_refusal(error)}") from None
    except _DAMAGE as error:
        reason = _first_line(error)
        if not reason.startswith(str(path)):
            reason = f"{path} is damaged: {reason}"
        raise ValueError(reason) from None


def _explain_refusal(error: pickle.UnpicklingError) -> str:
    """Returns why a pickle is not loaded: its size, or a class that it names."""
    if str(error).startswith("it "):  # from `check_pickle`
        return str(error)
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    what = f"a {foreign[1]}" if foreign else "an object that needs code to load"
    return f"besides tensors and plain values it holds {what}"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else repr(error)


def locate_tensors(
    path: Path, state: Mapping[Any, Any], file_state: FileState
) -> dict[str, StoredTensor]:
    """Returns the stored tensors of a state dictionary that `load_without_storage` read.

    Args:
        path: The file.
        state: The dictionary.
        file_state: The state of the file before `load_without_storage` opened it.

    Raises:
        ValueError: An entry is no tensor, or a tensor is not dense and complete.
    """
    records = ZipRecords(path) if zipfile.is_zipfile(path) else None
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in state.items():
        if isinstance(name, str) and tensor is None:
            continue  # a parameter that its module does not have
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{path}: {describe(name)} is a {type(tensor).__name__}, "
                f"but weights are named tensors"
            )
        tensors[name] = _locate(path, name, tensor, records, file_state)
    return tensors


def locate_saved_tensor(path: Path, name: str, start: int, length: int) -> StoredTensor:
    """Returns the tensor that `torch.save` wrote into `length` bytes of a file from `start` on.

    Raises:
        ValueError: There is something else, or the tensor is not contiguous, dense and complete.
    """
    where = f"tensor {name} in {path}"
    file_state = read_file_state(path)
    records = ZipRecords(path, (start, length))
    storages: dict[str, torch.TypedStorage] = {}
    unpickler: Any = _weights_only_unpickler.Unpickler(
        io.BytesIO(records.pickled), encoding="utf-8"
    )
    unpickler.persistent_load = partial(_make_meta_storage_of_zip, storages=storages)
    try:
        with _only_placeholder_types():
            tensor = unpickler.load()
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        raise ValueError(f"{where} is refused: {_first_line(error)}") from None
    if not isinstance(tensor, torch.Tensor) or len(storages) != 1:
        raise ValueError(f"{where} is a {type(tensor).__name__}, not one tensor")
    (key,) = storages
    first_byte = records.named.get(f"data/{key}")
    if first_byte is not None:
        cast(Any, tensor.untyped_storage())._checkpoint_offset = first_byte
    if tensor.layout == torch.strided and tensor.numel() and not tensor.is_contiguous():
        raise ValueError(f"{where} is not contiguous; save it after .contiguous()")
    return _locate(path, name, tensor, records, file_state)


def _locate(
    path: Path, name: str, tensor: torch.Tensor, records: ZipRecords | None, file_state: FileState
) -> StoredTensor:
    """Returns where a meta tensor's bytes are, after checking that they are all in the file."""
    where = f"tensor {name} in {path}"
    is_strided = tensor.layout == torch.strided
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested or not is_strided:
        raise ValueError(
            f"{where} is not a dense tensor but {tensor.layout}; save it after .to_dense()"
        )
    dtype = from_torch_name(str(tensor.dtype))
    storage = tensor.untyped_storage()
    storage_start = getattr(storage, "_checkpoint_offset", None)
    if storage_start is None and tensor.numel():
        raise ValueError(f"{where} has no bytes in the file")
    storage_start = storage_start or 0
    offset = storage_start + int(tensor.storage_offset()) * tensor.element_size()
    shape = tuple(tensor.shape)
    stored = StoredTensor(name, path, dtype, shape, offset, file_state=file_state)
    if tensor.numel():
        stop = offset + stored.nbytes
        if not tensor.is_contiguous():
            strides = tensor.stride()
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            stop = offset + (last + 1) * tensor.element_size()
            if stored.nbytes > max(stop - offset, LARGEST_EXPANDED):
                raise ValueError(
                    f"{where} repeats {stop - offset:,} bytes of the file as {stored.nbytes:,}; "
                    "save it after .contiguous()"
                )
            stored = StridedTensor(
                name, path, dtype, shape, offset, shape, strides, file_state=file_state
            )
        if records is not None:
            is_complete = records.contain(storage_start, stop)
        else:
            is_complete = stop <= storage_start + storage.nbytes()
        if not is_complete:
            raise ValueError(f"{where} claims bytes outside its record of the file")
    return stored


class FileWindow(io.RawIOBase):
    """Reads a range of a file as if it were a whole file."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = path.open("rb")
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("it points before its beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


class ZipRecords:
    """The positions of the records in a zip file.

    Args:
        path: The file.
        window: First byte and length of a zip file within the file; by default the whole file.

    Attributes:
        named: Name of a record, without that of its folder -> its first byte in the file.
        pickled: The contents of `data.pkl`.

    Raises:
        ValueError: `torch.save` would not write such a file.
    """

    def __init__(self, path: Path, window: tuple[int, int] | None = None) -> None:
        self._stops: dict[int, int] = {}
        self.named: dict[str, int] = {}
        self.pickled = b""
        base, length = window or (0, path.stat().st_size)
        try:
            with FileWindow(path, base, length) as raw, io.BufferedReader(raw) as file:
                _check_directory(path, file)
                with zipfile.ZipFile(file) as archive:
                    for info in archive.infolist():
                        self._check_record(path, archive, info)
                        file.seek(info.header_offset)
                        header = file.read(_LOCAL_NAME_LENGTHS.size)
                        name_length, extra_length = _LOCAL_NAME_LENGTHS.unpack(header)
                        start = base + info.header_offset + len(header) + name_length + extra_length
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

    def _check_record(self, path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        """Refuses records that torch.save would not write, and keeps the pickle."""
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{path} is compressed, which torch.save does not do")
        if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
            raise ValueError(f"{path} was written on a big-endian machine")
        if info.filename.endswith("/data.pkl"):
            if info.file_size > LARGEST_PICKLE:
                raise ValueError(
                    f"{path} has {info.file_size:,} pickled bytes, "
                    f"but at most {LARGEST_PICKLE:,} are read"
                )
            self.pickled = archive.read(info)
            if _ALLOCATION in self.pickled:
                raise ValueError(
                    f"{path} is refused: besides tensors and plain values it holds a bytearray"
                )
            try:
                check_pickle(self.pickled)
            except pickle.UnpicklingError as error:
                raise ValueError(f"{path} is refused: {_explain_refusal(error)}") from None
            except (ValueError, LookupError) as error:
                raise ValueError(f"{path} is damaged: {error}") from None

    def contain(self, start: int, stop: int) -> bool:
        """Returns whether a record starts at byte `start` and reaches at least to byte `stop`."""
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0 or self._starts[index] != start:
            return False
        return stop <= min(self._stops[start], self._size)


def _check_directory(path: Path, file: BinaryIO) -> None:
    """Raises ValueError if listing the records would take too much memory."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_DIRECTORY.size))
    signature, length = _END_DIRECTORY.unpack(file.read(_END_DIRECTORY.size))
    if signature != b"PK\5\6":
        raise ValueError(
            f"{path} has bytes after the end of its zip format, which torch.save does not write"
        )
    if length == _IN_WIDE_FIELD:
        file.seek(max(0, size - _END_DIRECTORY.size - _LOCATOR_OFFSET.size))
        _, offset = _LOCATOR_OFFSET.unpack(file.read(_LOCATOR_OFFSET.size))
        file.seek(min(offset, size))
        _, length = _WIDE_END_DIRECTORY.unpack(file.read(_WIDE_END_DIRECTORY.size))
    limit = min(LARGEST_DIRECTORY, size)
    if length > limit:
        raise ValueError(
            f"{path} lists its records in {length:,} bytes, but at most {limit:,} are allowed"
        )


@contextmanager
def _only_placeholder_types() -> Generator[None]:
    """Lets `torch.load` replace the types of `PLACEHOLDER_TYPES`, and refuse all others.

    Other libraries may have allowed types of their own in this process; they are set aside.
    """
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
    """Replaces an object whose contents are not needed: it ignores all arguments and state."""

    def __new__(cls, *args: object, **kwargs: object) -> PlaceholderObject:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class SavedArguments(PlaceholderObject):
    """Replaces an `argparse.Namespace`: its plain values by name; others are left out."""

    values: Mapping[str, PlainValue] = MappingProxyType({})

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.values = self.select_plain(cast(dict[Any, Any], state))
        else:
            self.values = {}

    @staticmethod
    def select_plain(state: Mapping[Any, Any]) -> dict[str, PlainValue]:
        """Returns the entries with plain values, and lists of such as tuples."""
        found: dict[str, PlainValue] = {}
        for name, value in state.items():
            if type(name) is not str:
                continue
            if type(value) in PLAIN_TYPES:
                found[name] = value
            elif type(value) in (list, tuple) and all(
                type(entry) in PLAIN_TYPES for entry in value
            ):
                found[name] = tuple(value)
        return found


def _load_before_zip(path: Path) -> Any:
    """Loads the format from before torch 1.6: five pickles, then length and bytes of each storage.

    The pickles are a magic number, a version, facts about the machine, the objects, and the order
    of the storages.
    """
    with path.open("rb") as file:
        pickled = _BoundedPickles(file)
        try:
            magic = _load_plain(pickled)
        except (pickle.UnpicklingError, *_DAMAGE):
            magic = None
        if magic != MAGIC_NUMBER or _load_plain(pickled) != PROTOCOL_VERSION:
            raise ValueError(f"{path} is not in a format of torch.save, or it is truncated")

        machine = _load_plain(pickled)
        if (
            isinstance(machine, dict)
            and cast(dict[Any, Any], machine).get("little_endian") is False
        ):
            raise ValueError(f"{path} was written on a big-endian machine")

        storages: dict[str, torch.TypedStorage] = {}
        pickled.check_next()
        unpickler: Any = _weights_only_unpickler.Unpickler(pickled, encoding="utf-8")
        unpickler.persistent_load = partial(_make_meta_storage, storages=storages)
        state = unpickler.load()

        order = _load_plain(pickled)
        keys = None
        if isinstance(order, list):
            keys = [_name_storage(key) for key in cast(list[Any], order)]
        if keys is None or sorted(keys) != sorted(storages):
            raise ValueError(f"{path} does not list the storages that its tensors use")
        _place_storages(path, file, [storages[key] for key in keys])
    return state


def _load_plain(pickled: _BoundedPickles) -> Any:
    """Returns the object of the next pickle, which has no tensors."""
    pickled.check_next()
    return _weights_only_unpickler.load(pickled, encoding="utf-8")


class _BoundedPickles:
    """Reads the pickles at the start of a file, but at most `LARGEST_PICKLE` bytes of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def check_next(self) -> None:
        """Checks the pickle that comes next, as `check_pickle` does, without moving behind it."""
        start = self._file.tell()
        check_pickle(self)
        self._file.seek(start)

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


def _name_storage(key: Any) -> str:
    """Returns the name of a storage, which a pickle has as a text or a number."""
    if not isinstance(key, (str, int)):
        raise ValueError(f"it names a storage by {describe(key)}")
    return str(key)


def _make_meta_storage(saved: Any, storages: dict[str, torch.TypedStorage]) -> torch.TypedStorage:
    """Returns the storage that a persistent id of the old format names, on the meta device."""
    kind, storage_type, key, _, count, view = saved
    if kind not in ("storage", b"storage") or view is not None:
        raise ValueError("it contains views of storages, which only torch before 0.4 wrote")
    dtype = storage_type.dtype
    name = _name_storage(key)
    if name not in storages:
        storage = torch.UntypedStorage(count * dtype.itemsize, device="meta")
        storages[name] = torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return storages[name]


def _make_meta_storage_of_zip(
    saved: Any, storages: dict[str, torch.TypedStorage]
) -> torch.TypedStorage:
    """Does the same for the zip format, whose persistent ids have no views."""
    return _make_meta_storage((*saved, None), storages)


def _place_storages(path: Path, file: BinaryIO, storages: list[torch.TypedStorage]) -> None:
    """Records the position of each storage's bytes.

    Raises:
        ValueError: The file and its pickle claim different lengths.
    """
    size = os.fstat(file.fileno()).st_size
    position = file.tell()
    for typed in storages:
        storage: Any = cast(Any, typed)._untyped_storage
        file.seek(position)
        (count,) = struct.unpack("<q", file.read(8))
        if count * typed.dtype.itemsize != storage.nbytes():
            raise ValueError(
                f"{path} has a storage of {count:,} elements, "
                f"but its pickle claims {storage.nbytes():,} bytes"
            )
        storage._checkpoint_offset = position + 8
        position += 8 + storage.nbytes()
    if position != size:
        raise ValueError(f"{path} has {size:,} bytes, but its tensors end at {position:,}")


# ---------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class PlannedRecord:
    """Where a record of a planned zip file is. Its checksum is known only when it is written.

    Attributes:
        name: The name in the zip file.
        local_header: First byte of the header before the record.
        central_header: First byte of the header in the directory.
        start: First byte of the record.
        length: Bytes of the record.
    """

    name: str
    local_header: int
    central_header: int
    start: int
    length: int

    def shift(self, count: int) -> PlannedRecord:
        """Returns the record of the same zip file `count` bytes further on."""
        return replace(
            self,
            local_header=self.local_header + count,
            central_header=self.central_header + count,
            start=self.start + count,
        )


@dataclass(frozen=True)
class PlannedTorchFile(PlannedFile):
    """A file in torch's zip format that will be written.

    Attributes:
        contents: (first byte, bytes) of everything that is not a tensor.
        records: All records of the zip format, whose headers get checksums at the end.
    """

    contents: tuple[tuple[int, bytes], ...] = ()
    records: tuple[PlannedRecord, ...] = ()

    def create(self, path: Path) -> None:
        super().create(path)
        with path.open("r+b") as file:
            for offset, content in self.contents:
                os.pwrite(file.fileno(), content, offset)

    def complete(self, path: Path) -> None:
        """Writes the checksums of all records into their headers."""
        with path.open("r+b") as file:
            descriptor = file.fileno()
            for record in self.records:
                checksum = 0
                stop = record.start + record.length
                for position in range(record.start, stop, 1 << 20):
                    block = os.pread(descriptor, min(1 << 20, stop - position), position)
                    checksum = zlib.crc32(block, checksum)
                packed = struct.pack("<L", checksum)
                os.pwrite(descriptor, packed, record.local_header + _LOCAL_CHECKSUM_AT)
                os.pwrite(descriptor, packed, record.central_header + _CENTRAL_CHECKSUM_AT)


def plan_torch_file(
    name: str,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    arrange: Callable[[OrderedDict[str, Any]], Any],
) -> PlannedTorchFile:
    """Plans a torch file.

    Args:
        name: The path within the destination.
        shapes: Name of a tensor -> (safetensors name of its type, shape).
        arrange: Makes, of the named tensors, the object that the file loads as.

    Raises:
        ValueError: Such files cannot store a type.
    """
    for tensor, (dtype, _) in shapes.items():
        if dtype not in _STORAGES:
            raise ValueError(
                f"a torch file cannot hold {dtype}, the type of {tensor}; "
                f"choose another one with --dtype"
            )

    # The records in the order of torch.save: of tensors only the bytes' number is known.
    records: list[tuple[str, bytes | int]] = [
        ("data.pkl", _pickle_tensors(shapes, arrange)),
        ("byteorder", b"little"),
    ]
    for number, (dtype, shape) in enumerate(shapes.values()):
        records.append((f"data/{number}", prod(shape) * item_size(dtype)))
    records.append(("version", b"3\n"))

    # Each record follows its local header.
    position = 0
    contents: list[tuple[int, bytes]] = []
    placed: list[PlannedRecord] = []
    for record_name, content in records:
        length = content if isinstance(content, int) else len(content)
        local = _pack_local_header(record_name, length, position)
        if isinstance(content, int):
            contents.append((position, local))
        else:
            contents.append((position, local + content))
        start = position + len(local)
        placed.append(PlannedRecord(record_name, position, 0, start, length))
        position = start + length

    # The directory at the end has a central header for each record.
    directory = b""
    for index, record in enumerate(placed):
        placed[index] = replace(record, central_header=position + len(directory))
        directory += _pack_central_header(record)
    end = _pack_end(len(placed), len(directory), position)
    contents.append((position, directory + end))
    size = position + len(directory) + len(end)

    path = Path(name)
    starts = {record.name: record.start for record in placed}
    tensors = {
        tensor: StoredTensor(tensor, path, dtype, shape, starts[f"data/{number}"])
        for number, (tensor, (dtype, shape)) in enumerate(shapes.items())
    }
    header = contents[0][1]
    return PlannedTorchFile(name, header, size, tensors, tuple(contents), tuple(placed))


def plan_concatenated_file(
    name: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[PlannedTorchFile, dict[str, tuple[int, int]]]:
    """Plans a file with one output of `torch.save` after another, one for each tensor.

    Args:
        name: The path within the destination.
        shapes: Name of a tensor -> (safetensors name of its type, shape).

    Returns:
        The file, and for each tensor the first byte and the length of its output.
    """
    position = 0
    contents: list[tuple[int, bytes]] = []
    records: list[PlannedRecord] = []
    tensors: dict[str, StoredTensor] = {}
    windows: dict[str, tuple[int, int]] = {}
    for tensor, shape in shapes.items():
        own = plan_torch_file(name, {tensor: shape}, _take_only_value)
        contents += [(position + offset, content) for offset, content in own.contents]
        records += [record.shift(position) for record in own.records]
        stored = own.tensors[tensor]
        tensors[tensor] = replace(stored, offset=stored.offset + position)
        windows[tensor] = (position, own.size)
        position += own.size
    header = contents[0][1]
    file = PlannedTorchFile(name, header, position, tensors, tuple(contents), tuple(records))
    return file, windows


def _take_only_value(tensors: OrderedDict[str, Any]) -> Any:
    (value,) = tensors.values()
    return value


@dataclass(frozen=True)
class _PickledStorage:
    """A storage that is pickled by its place in the zip file; `key` is the number of its record."""

    key: str
    dtype: str
    count: int


class _PickledTensor:
    """Is pickled as `torch.save` pickles a contiguous tensor."""

    def __init__(self, storage: _PickledStorage, shape: tuple[int, ...]) -> None:
        self._storage = storage
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(prod(self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        return _REBUILD_TENSOR, (self._storage, 0, self._shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, _PickledStorage):
            return "storage", _STORAGES[obj.dtype], obj.key, "cpu", obj.count
        return None


def _pickle_tensors(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    arrange: Callable[[OrderedDict[str, Any]], Any],
) -> bytes:
    tensors: OrderedDict[str, Any] = OrderedDict()
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        storage = _PickledStorage(str(number), dtype, prod(shape))
        tensors[name] = _PickledTensor(storage, shape)
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(arrange(tensors))
    return stream.getvalue()


def _encode_record_name(name: str) -> bytes:
    return f"{_ROOT}/{name}".encode()


def _pack_local_header(name: str, length: int, position: int) -> bytes:
    """Returns a record's local header.

    An extra field that readers skip fills it up, so that the record behind it starts aligned.
    """
    path = _encode_record_name(name)
    wide = _WIDE_SIZES.pack(1, 16, length, length)
    unpadded = position + _LOCAL_HEADER.size + len(path) + len(wide) + 4
    padding = -unpadded % _RECORD_ALIGNMENT
    extra = wide + struct.pack("<2H", _PADDING_FIELD, padding) + b"\0" * padding
    header = _LOCAL_HEADER.pack(
        b"PK\3\4",
        _ZIP_VERSION,
        0,
        0,
        0,
        _FIRST_DATE,
        0,
        _IN_WIDE_FIELD,
        _IN_WIDE_FIELD,
        len(path),
        len(extra),
    )
    return header + path + extra


def _pack_central_header(record: PlannedRecord) -> bytes:
    path = _encode_record_name(record.name)
    wide = _WIDE_SIZES_AND_OFFSET.pack(1, 24, record.length, record.length, record.local_header)
    header = _CENTRAL_HEADER.pack(
        b"PK\1\2",
        _ZIP_VERSION,
        _ZIP_VERSION,
        0,
        0,
        0,
        _FIRST_DATE,
        0,
        _IN_WIDE_FIELD,
        _IN_WIDE_FIELD,
        len(path),
        len(wide),
        0,
        0,
        0,
        0,
        _IN_WIDE_FIELD,
    )
    return header + path + wide


def _pack_end(count: int, length: int, start: int) -> bytes:
    """Returns the zip64 end of the directory, its locator, and the end in the older zip format."""
    wide = _WIDE_END.pack(
        b"PK\6\6",
        _WIDE_END.size - 12,
        _ZIP_VERSION,
        _ZIP_VERSION,
        0,
        0,
        count,
        count,
        length,
        start,
    )
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + length, 1)
    short_count = min(count, 0xFFFF)
    end = _END.pack(b"PK\5\6", 0, 0, short_count, short_count, _IN_WIDE_FIELD, _IN_WIDE_FIELD, 0)
    return wide + locator + end
