"""Keeps the inputs of recomputed blocks in the host's memory between the forward and the backward
pass.

A GPU copies an input on a stream of its own: to the host while the block computes, and back while
the backward pass of the block behind it does. So the device holds a few inputs at a time, however
many blocks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...ops.device import find_copy_stream, pins_host_memory


class OffloadedInput:
    """A tensor that is in the host's memory until a backward pass takes it.

    Args:
        x: The tensor, contiguous or not.
        stream: The stream that copies it, and all other inputs of the stack.
        previous: The input of the block before it, which a backward pass needs next.
    """

    def __init__(self, x: Tensor, stream: Any, previous: OffloadedInput | None) -> None:
        self._module: Any = torch.get_device_module(x.device)
        self._stream = stream
        self._previous = previous
        self._device = x.device
        pinned = pins_host_memory(x.device)
        self._host = torch.empty_like(x, device="cpu", pin_memory=pinned)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            self._host.copy_(x, non_blocking=True)
            self._copied = stream.record_event()
        # The copy reads it, so it must stay until `release`.
        self._leaving: Tensor | None = x
        self._arriving: tuple[Tensor, Any] | None = None

    def release(self) -> None:
        """Gives up the tensor's memory on the device, as soon as it has been copied."""
        if self._leaving is not None:
            self._module.current_stream(self._device).wait_event(self._copied)
            self._leaving = None

    def fetch(self) -> None:
        """Starts to copy the tensor back."""
        if self._arriving is not None:
            return
        self.release()
        # The memory belongs to the computing stream, which may still use what it was before.
        x = torch.empty_like(self._host, device=self._device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            x.copy_(self._host, non_blocking=True)
            self._arriving = (x, self._stream.record_event())

    def take(self) -> Tensor:
        """Returns the tensor on its device, and starts to fetch the one that is needed next."""
        self.fetch()
        assert self._arriving is not None
        x, arrived = self._arriving
        self._arriving = None
        self._module.current_stream(self._device).wait_event(arrived)
        if self._previous is not None:
            self._previous.fetch()
        return x


class BlockInputs:
    """The inputs of a stack's blocks in one forward pass, which go to the host.

    What the host's processor computes is in its memory already, and stays where it is.

    Args:
        device: That of the inputs.
        stream: The stream that copies them; by default one of the device's, or None if it has none.
    """

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._stream = stream or find_copy_stream(device)
        self._last: Callable[[], OffloadedInput | None] = lambda: None

    @contextmanager
    def keeping(self, x: Tensor) -> Generator[None]:
        """Within the context, what autograd keeps of x [B, S, H] is in the host's memory.

        What it keeps besides, such as masks that all blocks share, stays on the device.
        """
        if self._stream is None:
            yield
            return

        # Autograd keeps both functions as long as what they return, so they must not keep x.
        shape = x.shape
        address = x.data_ptr()

        def pack(kept: Tensor) -> Any:
            if kept.data_ptr() != address or kept.shape != shape:
                return kept
            previous = self._last()
            if previous is not None:
                previous.release()
            saved = OffloadedInput(kept, self._stream, previous)
            self._last = ref(saved)
            return saved

        def unpack(packed: Any) -> Tensor:
            return packed.take() if isinstance(packed, OffloadedInput) else packed

        with saved_tensors_hooks(pack, unpack):
            yield
