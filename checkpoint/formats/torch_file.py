"""Reads the files of `torch.save`. No code in a file runs.

Pickled objects are read with `weights_only=True`. Tensors get no storage, but each records the
position of its bytes in the file. An `argparse.Namespace` becomes `SavedArguments`, and other
objects that training frameworks save next to the weights become a `PlaceholderObject`; all other
classes are refused.

`legacy_torch_file.py` reads the format from before torch 1.6; `torch_file_writer.py` writes files.
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
from torch import _utils, _weights_only_unpickler

from ...files.printable import describe
from ..dtypes import from_torch_name
from ..stored_tensor import FileState, StoredTensor, StridedTensor, read_file_state
from .legacy_torch_file import load_legacy_file, make_meta_storage
from .pickle_check import ALLOCATION, DAMAGE, LARGEST_PICKLE, check_pickle

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

# The parts of zip files that are read; fields without use are skipped.
_LOCAL_NAME_LENGTHS = struct.Struct("<26xHH")  # of a record: bytes of its name, of its extra field
_END_DIRECTORY = struct.Struct("<4s8xL6x")  # of the file: signature, bytes of its directory
_WIDE_END_DIRECTORY = struct.Struct("<4s36xQ8x")  # the same in the zip64 format
_LOCATOR_OFFSET = struct.Struct("<4s4xQ4x")  # signature, first byte of the zip64 end
IN_WIDE_FIELD = 0xFFFFFFFF  # means that the zip64 field has the number


def load_without_storage(path: Path) -> Any:
    """Returns the object in a file, with its tensors on the meta device.

    Raises:
        ValueError: The file is damaged, or loading it needs code.
    """
    try:
        with _only_placeholder_types():
            return _load_zip_file(path) if zipfile.is_zipfile(path) else load_legacy_file(path)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {_explain_refusal(error)}") from None
    except DAMAGE as error:
        reason = _first_line(error)
        if not reason.startswith(str(path)):
            reason = f"{path} is damaged: {reason}"
        raise ValueError(reason) from None


def _load_zip_file(path: Path) -> Any:
    """Loads the format since torch 1.6: a zip file with a pickle and a record of each storage.

    torch.load does the same, but since torch 2.14 it reads the indices of sparse tensors.
    """
    records = ZipRecords(path)
    storages: dict[str, torch.TypedStorage] = {}
    state = _make_unpickler(records, storages).load()
    for key, typed in storages.items():
        if f"data/{key}" not in records.named:
            raise ValueError(f"it has no record of its storage {key!r:.50}")
        cast(Any, typed)._untyped_storage._checkpoint_offset = records.named[f"data/{key}"]
    return state


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
    tensor = _unpickle(records, storages, where)
    if not isinstance(tensor, torch.Tensor) or len(storages) != 1:
        raise ValueError(f"{where} is a {type(tensor).__name__}, not one tensor")
    (key,) = storages
    first_byte = records.named.get(f"data/{key}")
    if first_byte is not None:
        cast(Any, tensor.untyped_storage())._checkpoint_offset = first_byte
    if tensor.layout == torch.strided and tensor.numel() and not tensor.is_contiguous():
        raise ValueError(f"{where} is not contiguous; save it after .contiguous()")
    return _locate(path, name, tensor, records, file_state)


def load_object(path: Path, name: str, start: int, length: int) -> Any:
    """Returns what `torch.save` wrote into `length` bytes of a file from `start` on, with its
    tensors on the meta device.

    Raises:
        ValueError: The bytes are damaged, or loading them needs code.
    """
    return _unpickle(ZipRecords(path, (start, length)), {}, f"{name} in {path}")


def _unpickle(records: ZipRecords, storages: dict[str, torch.TypedStorage], where: str) -> Any:
    """Returns the object of some records, and adds the storages of its tensors."""
    try:
        with _only_placeholder_types():
            return _make_unpickler(records, storages).load()
    except (pickle.UnpicklingError, *DAMAGE) as error:
        raise ValueError(f"{where} is refused: {_first_line(error)}") from None


def _make_unpickler(records: ZipRecords, storages: dict[str, torch.TypedStorage]) -> Any:
    """Returns what loads the object of some records, and adds the storages of its tensors."""
    unpickler: Any = _weights_only_unpickler.Unpickler(
        io.BytesIO(records.pickled), encoding="utf-8"
    )
    unpickler.persistent_load = partial(_make_meta_storage_of_zip, storages=storages)
    return unpickler


def _make_meta_storage_of_zip(
    saved: Any, storages: dict[str, torch.TypedStorage]
) -> torch.TypedStorage:
    """Returns the storage that a persistent id of the zip format names, on the meta device."""
    # Persistent ids of the older format also say whether the storage is a view of another one.
    return make_meta_storage((*saved, None), storages)


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
                        name = info.filename.partition("/")[2]
                        if name in self.named:
                            raise ValueError(f"{path} has two records of the name {name!r:.50}")
                        self.named[name] = start
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
        if info.filename.partition("/")[2] == "data.pkl":
            if info.file_size > LARGEST_PICKLE:
                raise ValueError(
                    f"{path} has {info.file_size:,} pickled bytes, "
                    f"but at most {LARGEST_PICKLE:,} are read"
                )
            self.pickled = archive.read(info)
            if ALLOCATION in self.pickled:
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
    """Raises ValueError if listing the records would take too much memory, or if the zip format
    does not begin where the file does."""
    if file.read(4) != b"PK\3\4":
        raise ValueError(f"{path} has bytes before its zip format, which torch.save does not write")
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_DIRECTORY.size))
    signature, length = _END_DIRECTORY.unpack(file.read(_END_DIRECTORY.size))
    if signature != b"PK\5\6":
        raise ValueError(
            f"{path} has bytes after the end of its zip format, which torch.save does not write"
        )
    if length == IN_WIDE_FIELD:
        file.seek(max(0, size - _END_DIRECTORY.size - _LOCATOR_OFFSET.size))
        _, offset = _LOCATOR_OFFSET.unpack(file.read(_LOCATOR_OFFSET.size))
        file.seek(min(offset, size))
        _, length = _WIDE_END_DIRECTORY.unpack(file.read(_WIDE_END_DIRECTORY.size))
    limit = min(LARGEST_DIRECTORY, size)
    if length > limit:
        raise ValueError(
            f"{path} lists its records in {length:,} bytes, but at most {limit:,} are allowed"
        )


def list_unchecked_tensors() -> list[torch.Tensor]:
    """Returns torch's own list of the sparse tensors that its unpickler made."""
    utils = cast(Any, _utils)
    if hasattr(utils, "_sparse_tensors_to_validate"):
        return utils._sparse_tensors_to_validate
    return utils._get_sparse_tensors_to_validate()  # one for each thread, from torch 2.15 on


@contextmanager
def _only_placeholder_types() -> Generator[None]:
    """Lets torch's unpickler replace the types of `PLACEHOLDER_TYPES`, and refuse all others.

    Other libraries may have allowed types of their own in this process; they are set aside.

    torch keeps a list of the sparse tensors that its unpickler made, whose indices the next
    `torch.load` checks. Tensors without storage have none, so they leave the list again.
    """
    unchecked = list_unchecked_tensors()
    before = len(unchecked)
    allowed_by_others = cast(list[Any], torch.serialization.get_safe_globals())
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(PlaceholderObject, name) for name in PLACEHOLDER_TYPES])
    torch.serialization.add_safe_globals([(SavedArguments, "argparse.Namespace")])
    try:
        yield
    finally:
        del unchecked[before:]
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
