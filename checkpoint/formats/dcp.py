"""Reads the folders of `torch.distributed.checkpoint` (DCP), and Megatron-LM's `torch_dist` folders, which are such.

`.metadata` is a pickle that lists the tensors, their chunks, and where each chunk is: at an offset of a file
`__0_1.distcp`, as the output of `torch.save`. After `torch/distributed/checkpoint/metadata.py` and `filesystem.py`, and
megatron-core's `dist_checkpointing`.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, cast

from ...files.safe_paths import checked_file
from ...files.strict_json import read_folder_json
from ..dtypes import from_torch_name, item_size
from ..stored_tensor import ChunkedTensor, StoredTensor, pieces
from .megatron import VERSION, SavedRun, arguments_of, checked_version, read_state

METADATA = ".metadata"
SUFFIX = ".distcp"
LARGEST_METADATA = 16 << 20  # bytes, of about 300 for each chunk
MOST_DIMENSIONS = 16
MEGATRON_ARGUMENTS = "common.pt"

_TORCH = "torch.distributed.checkpoint"
# Classes and functions that a .metadata may name. None is imported: they become an `Inert` with their arguments.
_KNOWN = frozenset({
    f"{_TORCH}.filesystem._StorageInfo",
    f"{_TORCH}.metadata.BytesStorageMetadata",
    f"{_TORCH}.metadata.ChunkStorageMetadata",
    f"{_TORCH}.metadata.Metadata",
    f"{_TORCH}.metadata.MetadataIndex",
    f"{_TORCH}.metadata.StorageMeta",
    f"{_TORCH}.metadata.TensorProperties",
    f"{_TORCH}.metadata.TensorStorageMetadata",
    f"{_TORCH}.metadata._MEM_FORMAT_ENCODING",
    f"{_TORCH}.planner.SavePlan",
    f"{_TORCH}.planner.TensorWriteData",
    f"{_TORCH}.planner.WriteItem",
    f"{_TORCH}.planner.WriteItemType",
    "builtins.getattr",
    "collections.OrderedDict",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
    "torch.Size",
    "torch.serialization._get_layout",
})  # fmt: skip
# First parts of the names of what is not the model's.
_OTHERS = re.compile(
    r"(.*[./])?(optim|optimizer|optimizers|optimizer_state|chained_\d+|rng_state|lr_scheduler)[./].*"
)
_WRAPPERS = ("app", "state", "state_dict", "model", "module", "_orig_mod")
_STACKED = re.compile(r"(.*\blayers\.)(?!\d+\.)(.*)")  # Megatron-LM stores all layers as one tensor


@dataclass
class Inert:
    """An object of a pickle, as plain data: the name of its class, its arguments, and its state."""

    name: str
    arguments: Any = ()
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    __hash__ = object.__hash__  # such objects are keys of dictionaries

    def get(self, name: str) -> Any:
        return self.state.get(name)

    def set_state(self, state: Any) -> None:
        """Takes the attributes that a pickle gives to the object; a pair also has those of its slots."""
        for part in cast(tuple[Any, ...], state) if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.state.update(
                    {key: value for key, value in cast(Any, part).items() if isinstance(key, str)}
                )
        if isinstance(state, tuple):
            self.arguments = cast(Any, state)  # TensorProperties


class _Machine:
    """Runs a pickle without building anything but plain values and `Inert` objects."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self.stack.pop()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise ValueError(f"it has the opcode {opcode.name}")
            step(self, argument)
        raise ValueError("it has no end")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("it takes more values than there are")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def find(self, name: str) -> None:
        """Pushes a known class or function, or an element type."""
        if name not in _KNOWN and not re.fullmatch(r"torch\.\w+", name):
            raise ValueError(f"it holds a {name}")
        self.push(Inert(name))

    def call(self) -> None:
        called, arguments = self.last(2)
        if not isinstance(called, Inert) or called.state or called.arguments:
            raise ValueError("it calls something that is not a known class")
        if called.name == "builtins.getattr":
            self.push(_enum_member(arguments))
        else:
            self.push(
                {} if called.name == "collections.OrderedDict" else Inert(called.name, arguments)
            )

    def build(self) -> None:
        target, state = self.last(2)
        if isinstance(target, Inert):
            target.set_state(state)
        self.push(target)

    def set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError("it sets items of something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int, Inert)):  # hashing nested tuples can take forever
                raise ValueError(f"it has a {type(key).__name__} as key")
            target[key] = value

    def append(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("it appends to something that is not a list")
        cast(list[Any], target).extend(items)


def _enum_member(arguments: Any) -> Inert:
    """Returns a member of an enumeration, which some versions of Python pickle as `getattr(kind, name)`."""
    match arguments:
        case (Inert(arguments=()) as kind, str(member)) if not kind.state and member.isidentifier():
            return Inert(kind.name, (member,))
        case _:
            raise ValueError("it holds a builtins.getattr of something that is not an enumeration")


def _constant(machine: _Machine, argument: Any) -> None:
    machine.push(argument)


_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _constant),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _constant),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.last(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.last(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.last(3))),
    "APPEND": lambda m, _: m.append(m.last(1)),
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "SETITEM": lambda m, _: m.set_items(m.last(2)),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, at: m.memo.__setitem__(at, m.stack[-1])),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, at: m.push(m.memo[at])),
    "GLOBAL": lambda m, name: m.find(name.replace(" ", ".")),
    "STACK_GLOBAL": lambda m, _: m.find(".".join(map(str, m.last(2)))),
    "REDUCE": lambda m, _: m.call(),
    "NEWOBJ": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}  # fmt: skip


def read_metadata(folder: Path) -> Inert:
    """Returns the `Metadata` of a folder as plain data. ValueError if it is damaged or names other classes."""
    path = checked_file(folder, METADATA)
    size = path.stat().st_size
    if size > LARGEST_METADATA:
        raise ValueError(f"{path} has {size:,} bytes; such a file has at most {LARGEST_METADATA:,}")
    try:
        found = _Machine().run(path.read_bytes())
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise ValueError(f"{path} is refused: {str(error)[:200]}") from None
    if not isinstance(found, Inert) or not found.name.endswith("Metadata"):
        raise ValueError(f"{path} holds no Metadata of {_TORCH}")
    return found


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).exists()


def open_dcp(folder: Path) -> tuple[SavedRun | None, Mapping[str, StoredTensor]]:
    """Reads where the tensors of the model are, by name, and what Megatron-LM stored beside them, if it wrote them.

    The tensors of optimizers are left out, and so are names of wrappers that all others begin with.

    Raises ValueError if a file is missing or damaged, or if a tensor's chunks do not fit together.
    """
    metadata = read_metadata(folder)
    tensors = dict(_tensors(folder, metadata))
    saved = _megatron_run(folder)
    if saved is not None:
        tensors = dict(_unstack(tensors))
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(f"{wrapper}.") for name in tensors):
            tensors = {name.removeprefix(f"{wrapper}."): tensor for name, tensor in tensors.items()}
    if not tensors:
        raise ValueError(f"{folder / METADATA} lists no tensors of a model")
    return saved, tensors


def _megatron_run(folder: Path) -> SavedRun | None:
    description = read_folder_json(folder, "metadata.json")
    if description is None or "sharded_backend" not in description:
        return None
    if description["sharded_backend"] != "torch_dist":
        backend = description["sharded_backend"]
        raise ValueError(
            f"{folder} is a megatron-core checkpoint of the backend {backend!r}; only torch_dist is read"
        )
    path = folder / MEGATRON_ARGUMENTS
    state = read_state(checked_file(folder, path.name)) if path.exists() else {}
    iteration = state.get("iteration")
    version = checked_version(path, state, VERSION)
    run = SavedRun("megatron-core torch_dist", version, 1, arguments_of(state), None)
    return replace(run, iteration=iteration) if type(iteration) is int else run


Places = dict[
    tuple[str, tuple[int, ...]], Inert
]  # name of a tensor, first indices of a chunk -> where it is
Located = dict[
    tuple[str, int, int], StoredTensor
]  # file, offset, length -> what is there; two names can have the same


def _tensors(folder: Path, metadata: Inert) -> Iterator[tuple[str, StoredTensor]]:
    listed, placed = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(placed, dict):
        raise ValueError(f"{folder / METADATA} must have state_dict_metadata and storage_data")
    places: Places = {}
    located: Located = {}
    for index, place in cast(dict[Any, Any], placed).items():
        if not isinstance(index, Inert) or not isinstance(place, Inert):
            raise ValueError(
                f"{folder / METADATA}: the keys of storage_data must be MetadataIndex objects"
            )
        if index.get("offset") is not None:
            places[str(index.get("fqn")), _size(index.get("offset"), folder)] = place
    for name, entry in cast(dict[Any, Any], listed).items():
        if not isinstance(name, str) or not isinstance(entry, Inert):
            raise ValueError(f"{folder / METADATA} must list entries by name")
        is_tensor = entry.name.endswith(".TensorStorageMetadata")
        if is_tensor and not _OTHERS.fullmatch(name) and not name.endswith("_extra_state"):
            yield name, _tensor(folder, name, entry, places, located)


def _size(value: Any, folder: Path) -> tuple[int, ...]:
    """Returns the numbers of a `torch.Size`."""
    numbers = value.arguments[0] if isinstance(value, Inert) and len(value.arguments) == 1 else None
    if not isinstance(numbers, tuple) or len(cast(Any, numbers)) > MOST_DIMENSIONS:
        raise ValueError(f"{folder / METADATA} has a shape that is not a torch.Size")
    found = cast(tuple[Any, ...], numbers)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in found):
        raise ValueError(f"{folder / METADATA} has the shape {str(found)[:100]}")
    return found


def _tensor(
    folder: Path, name: str, entry: Inert, places: Places, located: Located
) -> StoredTensor:
    shape, chunks = _size(entry.get("size"), folder), entry.get("chunks")
    properties = entry.get("properties")
    kind = (
        properties.arguments[0] if isinstance(properties, Inert) and properties.arguments else None
    )
    if not isinstance(kind, Inert) or not isinstance(chunks, list) or not chunks:
        raise ValueError(f"{folder / METADATA}: tensor {name} has no type or no chunks")
    dtype = from_torch_name(kind.name)
    found: list[tuple[tuple[int, ...], StoredTensor]] = []
    for chunk in cast(list[Any], chunks):
        if not isinstance(chunk, Inert):
            raise ValueError(f"{folder / METADATA}: tensor {name} has a chunk that is none")
        start, size = _size(chunk.get("offsets"), folder), _size(chunk.get("sizes"), folder)
        fits = len(start) == len(size) == len(shape)
        if not fits or any(
            low + count > most for low, count, most in zip(start, size, shape, strict=True)
        ):
            where = f"the chunk at {list(start)} of {list(size)}"
            raise ValueError(
                f"{folder / METADATA}: {where} is outside tensor {name} of {list(shape)}"
            )
        if (place := places.get((name, start))) is None:
            raise ValueError(
                f"{folder / METADATA} does not place the chunk at {list(start)} of tensor {name}"
            )
        label = name if len(cast(Any, chunks)) == 1 else f"{name}{list(start)}"
        found.append(
            (start, _chunk(folder, StoredTensor(label, folder, dtype, size, 0), place, located))
        )
    if sum(tensor.numel for _, tensor in found) != prod(shape):
        raise ValueError(
            f"{folder / METADATA}: the chunks of tensor {name} do not have its {prod(shape):,} elements"
        )
    return _whole(shape, found)


def _chunk(folder: Path, wanted: StoredTensor, place: Inert, located: Located) -> StoredTensor:
    """Returns a chunk with its file and offset. ValueError if the file holds another tensor there."""
    from .torch_file import locate_saved_tensor

    path, offset, length = (place.get(name) for name in ("relative_path", "offset", "length"))
    if (
        not isinstance(path, str)
        or type(offset) is not int
        or type(length) is not int
        or min(offset, length) < 0
    ):
        raise ValueError(f"{folder / METADATA} does not say where tensor {wanted.name} is")
    if place.get("transform_descriptors"):
        raise ValueError(
            f"{folder / METADATA}: {wanted.name} is stored with {place.get('transform_descriptors')}"
        )
    if not path.endswith(SUFFIX):
        raise ValueError(
            f"{folder / METADATA} names the file {path!r}, which is not a {SUFFIX} file"
        )
    if (path, offset, length) not in located:
        found = locate_saved_tensor(checked_file(folder, path), wanted.name, offset, length)
        located[path, offset, length] = found
    found = located[path, offset, length]
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        mine, other = f"{wanted.dtype} {list(wanted.shape)}", f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"{found} is {other}, but {mine} according to {METADATA}")
    return found


def _unstack(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields each layer's tensor of those that Megatron-LM stores for all layers together, and all others."""
    for name, tensor in tensors.items():
        stacked = _STACKED.fullmatch(name)
        if stacked is None or not tensor.shape:
            yield name, tensor
            continue
        layers: dict[int, list[tuple[tuple[int, ...], StoredTensor]]] = {}
        for start, chunk in pieces(tensor):
            stride = prod(chunk.shape[1:]) * item_size(chunk.dtype)
            for at in range(chunk.shape[0]):
                part = replace(chunk, shape=chunk.shape[1:], offset=chunk.offset + at * stride)
                layers.setdefault(start[0] + at, []).append((start[1:], part))
        for layer, parts in layers.items():
            yield f"{stacked[1]}{layer}.{stacked[2]}", _whole(tensor.shape[1:], parts)


def _whole(
    shape: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], StoredTensor]]
) -> StoredTensor:
    first = parts[0][1]
    if len(parts) == 1 and first.shape == shape:
        return first
    return ChunkedTensor(
        first.name, first.file, first.dtype, shape, first.offset, tuple(sorted(parts, key=_start))
    )


def _start(part: tuple[tuple[int, ...], StoredTensor]) -> tuple[int, ...]:
    return part[0]
