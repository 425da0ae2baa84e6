"""Reads the format of `torch.save` from before torch 1.6. No code in a file runs."""

# (torch leaves the types of its unpickler open)
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import os
import pickle
import struct
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import _weights_only_unpickler
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ...files.printable import describe
from .pickle_check import ALLOCATION, DAMAGE, LARGEST_PICKLE, check_pickle


def load_legacy_file(path: Path) -> Any:
    """Loads the format from before torch 1.6: five pickles, then length and bytes of each storage.

    The pickles are a magic number, a version, facts about the machine, the objects, and the order
    of the storages.
    """
    with path.open("rb") as file:
        pickled = _BoundedPickles(file)
        try:
            magic = _load_plain(pickled)
        except (pickle.UnpicklingError, *DAMAGE):
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
        unpickler.persistent_load = partial(make_meta_storage, storages=storages)
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
        if line == ALLOCATION:
            raise pickle.UnpicklingError("GLOBAL bytearray")
        return line


def _name_storage(key: Any) -> str:
    """Returns the name of a storage, which a pickle has as a text or a number."""
    if not isinstance(key, (str, int)):
        raise ValueError(f"it names a storage by {describe(key)}")
    return str(key)


def make_meta_storage(saved: Any, storages: dict[str, torch.TypedStorage]) -> torch.TypedStorage:
    """Returns the storage that a persistent id of the old format names, on the meta device."""
    kind, storage_type, key, _, count, view = saved
    if kind not in ("storage", b"storage") or view is not None:
        raise ValueError("it contains views of storages, which only torch before 0.4 wrote")
    # Types that no class of storages has, such as those of 8 bits, are saved in storages of bytes.
    dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
    name = _name_storage(key)
    if name not in storages:
        storage = torch.UntypedStorage(count * dtype.itemsize, device="meta")
        storages[name] = torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return storages[name]


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
