"""Reads, plans and names the folders of `torch.distributed.checkpoint` (DCP).

`.metadata` is a pickle that lists the tensors, their chunks, and where each chunk is: at an offset
of a file `__0_1.distcp`, as the output of `torch.save`. After
`torch/distributed/checkpoint/metadata.py` and `filesystem.py`. Megatron-LM's `torch_dist` folders
are such folders with a description of their own, after megatron-core's `dist_checkpointing`.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...files.printable import describe
from ...files.safe_paths import checked_file
from ...files.strict_json import read_folder_json
from ..dtypes import from_torch_name, item_size, torch_name
from ..stored_tensor import Chunk, ChunkedTensor, StoredTensor, list_chunks
from .megatron import VERSION, SavedRun, check_version, read_arguments, read_state

if TYPE_CHECKING:  # It imports torch, which inspecting a folder does without.
    from .torch_file_writer import PlannedTorchFile

METADATA = ".metadata"
SUFFIX = ".distcp"
LARGEST_METADATA = 16 << 20  # bytes, of about 300 for each chunk
MOST_DIMENSIONS = 16
MEGATRON_ARGUMENTS = "common.pt"
MEGATRON_DESCRIPTION = "metadata.json"
MEGATRON_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_TORCH = "torch.distributed.checkpoint"
# Classes and functions that a .metadata may name. None is imported: each becomes an `InertObject`
# with its arguments.
_KNOWN_NAMES = frozenset({
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
# Names of what is not the model's: optimizer, random states, schedules.
_NOT_OF_THE_MODEL = re.compile(
    r"(.*[./])?"
    r"(optim|optimizer|optimizers|optimizer_state|chained_\d+|rng_state|lr_scheduler)"
    r"[./].*"
)
# Modules and dictionaries around the model, whose names all its tensors may begin with.
_WRAPPERS = ("app", "state", "state_dict", "model", "module", "_orig_mod")
_PARAMETER_ENDS = ("weight", "bias")
# Megatron-LM stores all layers as one tensor, whose name has no layer number.
_OF_A_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.*)")
_COMMON_STATE = "common_state/shard_"  # first part of the name of what lies beside the tensors
_STACKED = re.compile(r"(.*\blayers\.)(?!\d+\.)(.*)")
# And all experts of a layer.
_OF_AN_EXPERT = re.compile(r"(.*\.mlp\.experts\.)linear_fc([12])\.weight(\d+)")
_OF_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.linear_fc([12])\.weight")


@dataclass
class InertObject:
    """An object of a pickle, as plain data: the name of its class, its arguments, and its state."""

    name: str
    arguments: Any = ()
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    __hash__ = object.__hash__  # Such objects are keys of dictionaries.

    def get(self, name: str) -> Any:
        return self.state.get(name)

    def set_state(self, state: Any) -> None:
        """Takes the attributes that a pickle gives to the object.

        They are a dictionary, or a tuple of dictionaries if the object has slots. TensorProperties
        have a tuple of plain values, which become the arguments.
        """
        if isinstance(state, tuple):
            parts = cast(tuple[Any, ...], state)
            self.arguments = parts
        else:
            parts = (state,)
        for part in parts:
            if isinstance(part, dict):
                attributes = cast(dict[Any, Any], part)
                self.state.update({k: v for k, v in attributes.items() if isinstance(k, str)})


class _InertUnpickler:
    """Runs a pickle without building anything but plain values and `InertObject`s."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self.stack.pop()
            run_opcode = _OPCODES.get(opcode.name)
            if run_opcode is None:
                raise ValueError(f"it has the opcode {opcode.name}")
            run_opcode(self, argument)
        raise ValueError("it has no end")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_since_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("it takes more values than there are")
        start = len(self.stack) - count
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def find_class_on_stack(self) -> None:
        """Pushes the class whose module and name are on the stack."""
        module, name = self.pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names a class by something that is no text")
        self.find_class(f"{module}.{name}")

    def find_class(self, name: str) -> None:
        """Pushes a known class or function, or an element type."""
        if name not in _KNOWN_NAMES and not re.fullmatch(r"torch\.\w+", name):
            raise ValueError(f"it holds a {name}")
        self.push(InertObject(name))

    def call(self) -> None:
        called, arguments = self.pop(2)
        if not isinstance(called, InertObject) or called.state or called.arguments:
            raise ValueError("it calls something that is not a known class")
        if called.name == "builtins.getattr":
            self.push(_make_enum_member(arguments))
        elif called.name == "collections.OrderedDict":
            self.push({})
        else:
            self.push(InertObject(called.name, arguments))

    def build(self) -> None:
        target, state = self.pop(2)
        if isinstance(target, InertObject):
            target.set_state(state)
        self.push(target)

    def set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError("it sets items of something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples can take forever.
            if not isinstance(key, (str, int, InertObject)):
                raise ValueError(f"it has a {type(key).__name__} as key")
            target[key] = value

    def append(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("it appends to something that is not a list")
        cast(list[Any], target).extend(items)


def _make_enum_member(arguments: Any) -> InertObject:
    """Returns a member of an enumeration.

    Some versions of Python pickle it as `getattr(kind, name)`.
    """
    match arguments:
        case (InertObject(arguments=()) as kind, str(member)) if (
            not kind.state and member.isidentifier()
        ):
            return InertObject(kind.name, (member,))
        case _:
            raise ValueError("it holds a builtins.getattr of something that is not an enumeration")


def _push_constant(unpickler: _InertUnpickler, argument: Any) -> None:
    unpickler.push(argument)


_OPCODES: Mapping[str, Callable[[_InertUnpickler, Any], None]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _push_constant),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push_constant),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_since_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))),
    "APPEND": lambda m, _: m.append(m.pop(1)),
    "APPENDS": lambda m, _: m.append(m.pop_since_mark()),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_since_mark()),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, at: m.memo.__setitem__(at, m.stack[-1])),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, at: m.push(m.memo[at])),
    "GLOBAL": lambda m, name: m.find_class(name.replace(" ", ".")),
    "STACK_GLOBAL": lambda m, _: m.find_class_on_stack(),
    "REDUCE": lambda m, _: m.call(),
    "NEWOBJ": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}  # fmt: skip


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).exists()


def open_dcp(folder: Path) -> tuple[SavedRun | None, Mapping[str, StoredTensor]]:
    """Reads where the tensors of the model are.

    The tensors of optimizers are left out, and so are the names of wrappers around the model, with
    what lies beside it.

    Returns:
        What Megatron-LM stored beside the tensors, if it wrote them; and the tensors by name.

    Raises:
        ValueError: A file is missing or damaged, or a tensor's chunks do not fit together.
    """
    metadata = read_metadata(folder)
    tensors = _read_tensors(folder, metadata)
    saved = _read_megatron_run(folder, metadata)
    if saved is not None:
        tensors = dict(_split_layers(tensors))
    for wrapper in _WRAPPERS:
        tensors = _unwrap(tensors, f"{wrapper}.")
    for name in list(tensors):
        # A state without wrappers may have a number of steps beside the modules' parameters.
        if "." not in name and not name.endswith(_PARAMETER_ENDS):
            del tensors[name]
    if not tensors:
        raise ValueError(f"{folder / METADATA} lists no tensors of a model")
    return saved, tensors


def _unwrap(tensors: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """Returns the tensors without a prefix of their names, if it is that of the model.

    It is if all have it but those that no module has as parameters: the number of steps or the
    state of a data loader. `lm_head.weight` beside `model.layers…` is the model's own, and then
    `model.` belongs to the names.
    """
    inside = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    for name in tensors:
        if not name.startswith(prefix) and name.endswith(_PARAMETER_ENDS):
            return tensors
    return inside or tensors


def read_metadata(folder: Path) -> InertObject:
    """Returns the `Metadata` of a folder as plain data.

    Raises:
        ValueError: The file is damaged or names other classes.
    """
    path = checked_file(folder, METADATA)
    size = path.stat().st_size
    if size > LARGEST_METADATA:
        raise ValueError(f"{path} has {size:,} bytes; such a file has at most {LARGEST_METADATA:,}")
    try:
        found = _InertUnpickler().load(path.read_bytes())
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
    if not isinstance(found, InertObject) or not found.name.endswith("Metadata"):
        raise ValueError(f"{path} holds no Metadata of {_TORCH}")
    return found


def _read_megatron_run(folder: Path, metadata: InertObject) -> SavedRun | None:
    """Returns what megatron-core's own files say, or None if it did not write the folder.

    The arguments are in `common.pt`, or in newer releases such as 0.19 among the tensors, as a list
    of one dictionary.
    """
    description = read_folder_json(folder, MEGATRON_DESCRIPTION)
    if description is None or "sharded_backend" not in description:
        return None
    if description["sharded_backend"] != "torch_dist":
        backend = description["sharded_backend"]
        raise ValueError(
            f"{folder} is a megatron-core checkpoint of the backend {backend!r}; "
            f"only torch_dist is read"
        )
    path = folder / MEGATRON_ARGUMENTS
    state: dict[Any, Any] = {}
    placed = metadata.get("storage_data")
    if path.exists():
        state = read_state(checked_file(folder, path.name))
    elif isinstance(placed, dict):
        for index, place in cast(dict[Any, Any], placed).items():
            name = index.get("fqn") if isinstance(index, InertObject) else None
            if (
                isinstance(name, str)
                and name.startswith(_COMMON_STATE)
                and isinstance(place, InertObject)
            ):
                state = _read_common_state(folder, name, place)
    version = check_version(path, state, VERSION)
    iteration = state.get("iteration")
    return SavedRun(
        tool="megatron-core torch_dist",
        version=version,
        stages=1,
        arguments=read_arguments(state),
        iteration=iteration if type(iteration) is int else None,
    )


def _read_common_state(folder: Path, name: str, place: InertObject) -> dict[Any, Any]:
    """Returns the dictionary that megatron-core stores beside the tensors."""
    from .torch_file import load_object

    file, offset, length = _read_place(folder, name, place)
    found = load_object(file, name, offset, length)
    match found:
        case [dict()]:
            return cast(Any, found)[0]
        case _:
            raise ValueError(f"{name} in {file} is no list of one dictionary")


# (name of a tensor, first indices of a chunk) -> where the chunk is.
Places = dict[tuple[str, tuple[int, ...]], InertObject]
# (file, offset, length) -> the tensor there; two names can have the same.
Located = dict[tuple[str, int, int], StoredTensor]


def _read_tensors(folder: Path, metadata: InertObject) -> dict[str, StoredTensor]:
    """Returns the model's tensors that the metadata lists, by name."""
    listed = metadata.get("state_dict_metadata")
    placed = metadata.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(placed, dict):
        raise ValueError(f"{folder / METADATA} must have state_dict_metadata and storage_data")

    places: Places = {}
    for index, place in cast(dict[Any, Any], placed).items():
        if not isinstance(index, InertObject) or not isinstance(place, InertObject):
            raise ValueError(
                f"{folder / METADATA}: the keys of storage_data must be MetadataIndex objects"
            )
        if index.get("offset") is not None:
            start = _read_size(index.get("offset"), folder)
            name = index.get("fqn")
            if not isinstance(name, str):
                raise ValueError(f"{folder / METADATA} places a tensor that has no name")
            places[name, start] = place

    tensors: dict[str, StoredTensor] = {}
    located: Located = {}
    for name, entry in cast(dict[Any, Any], listed).items():
        if not isinstance(name, str) or not isinstance(entry, InertObject):
            raise ValueError(f"{folder / METADATA} must list entries by name")
        if not entry.name.endswith(".TensorStorageMetadata"):
            continue
        if _NOT_OF_THE_MODEL.fullmatch(name) or name.endswith("_extra_state"):
            continue
        tensors[name] = _locate_tensor(folder, name, entry, places, located)
    return tensors


def _read_size(value: Any, folder: Path) -> tuple[int, ...]:
    """Returns the numbers of a `torch.Size`."""
    numbers = None
    if isinstance(value, InertObject) and len(value.arguments) == 1:
        numbers = value.arguments[0]
    if not isinstance(numbers, tuple) or len(cast(Any, numbers)) > MOST_DIMENSIONS:
        raise ValueError(f"{folder / METADATA} has a shape that is not a torch.Size")
    found = cast(tuple[Any, ...], numbers)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in found):
        described = ", ".join(map(describe, found))
        raise ValueError(f"{folder / METADATA} has the shape ({described})")
    return found


def _locate_tensor(
    folder: Path, name: str, entry: InertObject, places: Places, located: Located
) -> StoredTensor:
    """Returns the tensor of one entry of the metadata, with its chunks."""
    shape = _read_size(entry.get("size"), folder)
    chunks = entry.get("chunks")
    properties = entry.get("properties")
    kind = None
    if isinstance(properties, InertObject) and properties.arguments:
        kind = properties.arguments[0]
    if not isinstance(kind, InertObject) or not isinstance(chunks, list) or not chunks:
        raise ValueError(f"{folder / METADATA}: tensor {name} has no type or no chunks")
    dtype = from_torch_name(kind.name)
    count = len(cast(list[Any], chunks))

    found: list[Chunk] = []
    starts: set[tuple[int, ...]] = set()
    for chunk in cast(list[Any], chunks):
        if not isinstance(chunk, InertObject):
            raise ValueError(f"{folder / METADATA}: tensor {name} has a chunk that is none")
        start = _read_size(chunk.get("offsets"), folder)
        size = _read_size(chunk.get("sizes"), folder)
        if not _lies_within(start, size, shape):
            where = f"the chunk at {list(start)} of {list(size)}"
            raise ValueError(
                f"{folder / METADATA}: {where} is outside tensor {name} of {list(shape)}"
            )
        if start in starts:
            raise ValueError(
                f"{folder / METADATA}: the chunks of tensor {name} do not have its "
                f"{prod(shape):,} elements: the one at {list(start)} is there twice"
            )
        starts.add(start)
        place = places.get((name, start))
        if place is None:
            raise ValueError(
                f"{folder / METADATA} does not place the chunk at {list(start)} of tensor {name}"
            )
        label = name if count == 1 else f"{name}{list(start)}"
        expected = StoredTensor(label, folder, dtype, size, 0)
        found.append((start, _locate_chunk(folder, expected, place, located)))
    if sum(tensor.numel for _, tensor in found) != prod(shape):
        raise ValueError(
            f"{folder / METADATA}: the chunks of tensor {name} do not have its "
            f"{prod(shape):,} elements"
        )
    return _join_chunks(shape, found)


def _lies_within(start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Returns whether a chunk is inside of a tensor of this shape."""
    if not len(start) == len(size) == len(shape):
        return False
    return all(
        first + count <= length for first, count, length in zip(start, size, shape, strict=True)
    )


def _locate_chunk(
    folder: Path, expected: StoredTensor, place: InertObject, located: Located
) -> StoredTensor:
    """Returns a chunk with its file and offset.

    Raises:
        ValueError: The file holds another tensor there.
    """
    from .torch_file import locate_saved_tensor

    file, offset, length = _read_place(folder, f"tensor {expected.name}", place)
    key = (str(file), offset, length)
    if key not in located:
        located[key] = locate_saved_tensor(file, expected.name, offset, length)
    found = located[key]
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise ValueError(
            f"{found} is {found.dtype} {list(found.shape)}, "
            f"but {expected.dtype} {list(expected.shape)} according to {METADATA}"
        )
    return found


def _read_place(folder: Path, what: str, place: InertObject) -> tuple[Path, int, int]:
    """Returns the file, the first byte and the number of bytes of something that is stored.

    Raises:
        ValueError: The metadata does not say them, or there is no such file, or it is shorter.
    """
    path = place.get("relative_path")
    offset = place.get("offset")
    length = place.get("length")
    if (
        not isinstance(path, str)
        or type(offset) is not int
        or type(length) is not int
        or min(offset, length) < 0
    ):
        raise ValueError(f"{folder / METADATA} does not say where {what} is")
    transforms = place.get("transform_descriptors")
    if transforms:
        described = describe(transforms)
        if isinstance(transforms, list):
            described = f"[{', '.join(map(describe, cast(list[Any], transforms[:5])))}]"
        raise ValueError(f"{folder / METADATA}: {what} is stored with {described}")
    if not path.endswith(SUFFIX):
        raise ValueError(
            f"{folder / METADATA} names the file {describe(path)}, which is not a {SUFFIX} file"
        )
    file = checked_file(folder, path)
    if offset + length > file.stat().st_size:
        raise ValueError(f"{folder / METADATA} places {what} behind the end of {path}")
    return file, offset, length


def _split_layers(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields all tensors, those that Megatron-LM stores for all layers together layer by layer, and
    those that it stores for all experts expert by expert.
    """
    for name, tensor in tensors.items():
        stacked = _STACKED.fullmatch(name)
        if stacked is None or not tensor.shape:
            yield from _split_experts(name, tensor)
            continue
        for layer, own in _split_rows(tensor):
            yield from _split_experts(f"{stacked[1]}{layer}.{stacked[2]}", own)


def _split_experts(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yields a tensor of a layer, or those of each expert."""
    stacked = _OF_ALL_EXPERTS.fullmatch(name)
    if stacked is None or not tensor.shape:
        yield name, tensor
        return
    for expert, own in _split_rows(tensor):
        yield f"{stacked[1]}linear_fc{stacked[2]}.weight{expert}", own


def _split_rows(tensor: StoredTensor) -> Iterator[tuple[int, StoredTensor]]:
    """Yields the part of a tensor at each index of its first dimension."""
    by_index: dict[int, list[Chunk]] = {}
    for start, chunk in list_chunks(tensor):
        stride = prod(chunk.shape[1:]) * item_size(chunk.dtype)
        for index in range(chunk.shape[0]):
            row = replace(chunk, shape=chunk.shape[1:], offset=chunk.offset + index * stride)
            by_index.setdefault(start[0] + index, []).append((start[1:], row))
    for index, chunks in by_index.items():
        yield index, _join_chunks(tensor.shape[1:], chunks)


def stack_layers(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the (type, shape) of each tensor as Megatron-LM stores them: those of all layers of a
    stack as one, and so those of all experts.

    Raises:
        ValueError: The layers differ.
    """
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    stacked: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _OF_A_LAYER.fullmatch(name)
        if match is None:
            stacked[name] = shape
            continue
        own = layers.setdefault(match[1] + match[3], [])
        own.append(shape)
        if shape != own[0]:
            raise ValueError(
                f"{name} is {shape[0]} {list(shape[1])}, but {own[0][0]} {list(own[0][1])} in the "
                "first layer, and a torch_dist folder has all layers in one tensor; choose one type "
                "with --dtype"
            )
        stacked[match[1] + match[3]] = (shape[0], (len(own), *shape[1]))
    joined: dict[str, tuple[str, tuple[int, ...]]] = {}
    counts: Counter[str] = Counter()
    for name, (dtype, shape) in stacked.items():
        match = _OF_AN_EXPERT.fullmatch(name)
        if match is None:
            joined[name] = (dtype, shape)
            continue
        whole = _name_all_experts(match)
        counts[whole] += 1
        if joined.get(whole, (dtype,))[0] != dtype:
            raise ValueError(
                f"{name} is {dtype}, but {joined[whole][0]} in the first expert, and a torch_dist "
                "folder has all experts in one tensor; choose one type with --dtype"
            )
        joined[whole] = (dtype, (shape[0], counts[whole], *shape[1:]))
    return joined


def _name_all_experts(match: re.Match[str]) -> str:
    return f"{match[1]}experts.linear_fc{match[2]}.weight"


def find_layer(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    """Returns the tensor of that name, or the part of the layer, or of its expert, of the tensor of
    all of them.
    """
    match = _OF_A_LAYER.fullmatch(name)
    if match is None:
        return tensors[name]
    within = match[1] + match[3]
    numbers = [int(match[2])]
    of_expert = _OF_AN_EXPERT.fullmatch(within)
    if of_expert is not None:
        within = _name_all_experts(of_expert)
        numbers.append(int(of_expert[3]))
    part = tensors[within]
    for number in numbers:
        own = replace(part, name=name, shape=part.shape[1:])
        part = replace(own, offset=part.offset + number * own.nbytes)
    return part


def _join_chunks(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> StoredTensor:
    """Returns the tensor that consists of these chunks."""
    first = chunks[0][1]
    if len(chunks) == 1 and first.shape == shape:
        return first
    ordered = sorted(chunks, key=lambda chunk: chunk[0])
    return ChunkedTensor(first.name, first.file, first.dtype, shape, first.offset, tuple(ordered))


def plan_dcp_file(
    number: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]], folder: str = ""
) -> tuple[PlannedTorchFile, dict[str, tuple[int, int]]]:
    """Plans a file of tensors, each in one chunk.

    Args:
        number: The number of the file among those of the folder.
        shapes: Name of a tensor -> (safetensors name of its type, shape).
        folder: The folder within the destination that it lies in.

    Returns:
        The file, and for each tensor the first byte and the length of its chunk.
    """
    from .torch_file_writer import plan_concatenated_file

    return plan_concatenated_file(str(Path(folder, f"__{number}_0{SUFFIX}")), shapes)


def build_metadata(
    files: Sequence[tuple[PlannedTorchFile, Mapping[str, tuple[int, int]]]],
    aliases: Mapping[str, str],
) -> bytes:
    """Returns the `.metadata` of such files, which `torch.distributed.checkpoint` reads.

    Args:
        files: What `plan_dcp_file` returned for each.
        aliases: Another name for a stored tensor, which needs no bytes -> the stored name.
    """
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    listed: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for file, windows in files:
        for stored_name, (start, length) in windows.items():
            tensor = file.tensors[stored_name]
            origin = torch.Size([0] * len(tensor.shape))
            size = torch.Size(tensor.shape)
            properties = metadata.TensorProperties(dtype=getattr(torch, torch_name(tensor.dtype)))
            names = [stored_name]
            names += [alias for alias, kept in aliases.items() if kept == stored_name]
            for name in names:
                chunk = metadata.ChunkStorageMetadata(origin, size)
                listed[name] = metadata.TensorStorageMetadata(properties, size, [chunk])
                place = cast(Any, filesystem)._StorageInfo(Path(file.name).name, start, length)
                places[metadata.MetadataIndex(name, origin, 0)] = place
    paths = {name: (name,) for name in listed}
    return pickle.dumps(metadata.Metadata(listed, paths, places, metadata.StorageMeta(), "1.0.0"))
