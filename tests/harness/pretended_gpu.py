"""A device without data that passes for a GPU: PyTorch's meta device, on which the host's copies and waits are counted.

Code that asks whether a tensor is on the CPU takes the way that it takes on a GPU. Nothing is computed, so what needs
the values of a tensor is a wait, and gets zeros. While a CUDA graph is recorded, waits are refused, and so is pinned
memory that is sent: a graph would read the host's memory anew whenever it runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("meta")
# The sizes of their results, or their results, depend on data.
DEPENDENT = (
    "aten::nonzero", "aten::argwhere", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::bincount",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
)  # fmt: skip


class Waits(TorchDispatchMode):
    """Lists for what the host would wait, and where: values that it reads, and memory that it sends unpinned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.pinned: list[torch.Tensor] = []
        self.is_recording = False

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Stands for `record_graph`: raises RuntimeError where a recording would fail or go wrong."""
        self.is_recording = True
        try:
            return (lambda: None), function()
        finally:
            self.is_recording = False

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stands for `Tensor.pin_memory`."""
        if self.is_recording:
            self.note("memory that is pinned")
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def print(self, *_: Any, **__: Any) -> str:
        """Stands for `Tensor.__repr__`, which reads values. PyTorch prints arguments that do not fit an overload."""
        self.note("values that are printed")
        return "tensor(...)"

    def note(self, what: str) -> None:
        frames = [
            f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename
            if frame.filename != __file__
        ]
        self.found.append(f"{what} at {' < '.join(frames[:-5:-1])}")
        if self.is_recording:
            raise RuntimeError(f"a recorded step has {self.found[-1]}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if x.is_meta]
        on_host = [x for x in tensors if not x.is_meta]
        if name == "aten::_local_scalar_dense" and on_device:
            self.note("a number")
            return 0.0
        if name in ("aten::_to_copy", "aten::copy_"):
            target = args[0].device if name == "aten::copy_" else kwargs.get("device")
            reads = bool(on_device) and target is not None and torch.device(target).type == "cpu"
            if reads:
                self.note("values")
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            is_sent = bool(on_host) and target == DEVICE
            is_pinned = any(tensors[-1] is known for known in self.pinned)
            goes_on = is_pinned and kwargs.get("non_blocking") and not self.is_recording
            if is_sent and not goes_on:
                self.note("memory that is sent")
        elif name in DEPENDENT and on_device:
            is_known = name == "aten::repeat_interleave" and kwargs.get("output_size") is not None
            if not is_known:
                self.note(name)
        elif name.startswith("aten::index") and on_device:
            indices = tree_leaves(args[1])
            tensors = [x for x in indices if isinstance(x, torch.Tensor)]
            if any(x.dtype == torch.bool for x in tensors):
                self.note("a boolean index")
            if any(not x.is_meta for x in tensors):
                self.note("an index that is sent")
        elif on_device and any(x.dim() for x in on_host):
            self.note(f"{name} of tensors on both")
        if func is torch.ops.aten._fused_adamw_.tensor_lr and on_device:
            return None  # it has no kernel without data
        return func(*args, **kwargs)


class SentLists(TorchFunctionMode):
    """Tells `waits` of tensors that are made of numbers of the host, which no operator sees."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_sent = func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        if (
            is_sent
            and result.is_meta
            and (func is torch.Tensor.new_tensor or not isinstance(args[0], torch.Tensor))
        ):
            self.waits.note("a list that is sent")
        return result


@contextmanager
def pretended_gpu() -> Generator[Waits]:
    """Lets the trainer take the meta device for a GPU, and counts within the context."""
    from shardzoo.trainer import step
    from shardzoo.trainer.batches import loss_normalization

    supported = torch_optimizer._get_fused_kernels_supported_devices()
    has_autocast = torch.is_autocast_enabled
    autocast_dtype = torch.get_autocast_dtype
    waits = Waits()
    with (
        patch.object(step, "pins_host_memory", lambda _: False),  # of the results that are read
        patch.object(loss_normalization, "pins_host_memory", lambda _: True),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: waits.pin(tensor)),
        patch.object(torch.Tensor, "__repr__", waits.print),
        patch.object(
            torch_optimizer, "_get_fused_kernels_supported_devices", lambda: [*supported, "meta"]
        ),
        patch.object(
            torch, "is_autocast_enabled", lambda kind="cuda": kind != "meta" and has_autocast(kind)
        ),
        patch.object(
            torch,
            "get_autocast_dtype",
            lambda kind: torch.float16 if kind == "meta" else autocast_dtype(kind),
        ),
        waits,
        SentLists(waits),
    ):
        yield waits


@contextmanager
def first_of_ranks(size: int) -> Generator[Any]:
    """Provides the mesh of the first of so many tensor-parallel ranks, the others of which do not exist."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 - collectives of tensors without data
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardzoo.mpu import ParallelMesh

    if size == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield ParallelMesh(tensor_parallel_size=size)
    finally:
        dist.destroy_process_group()
