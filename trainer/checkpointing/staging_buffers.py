"""Provides staging buffers: CPU memory that snapshots are copied to, and that every save reuses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.tensor_reader import tensor_bytes
from ...ops.device import pins_host_memory


class StagingBuffers:
    """One tensor for each name, allocated at its first use. Allocating memory costs more than
    copying into it.

    For tensors of a GPU the memory is pinned, so that copies run at the speed of the bus and need
    one wait in all.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns contiguous copies of `tensors`, valid until the next call for this file.

        Copies from a GPU run on a separate stream, after the work queued on the current stream.
        """
        copies = {name: self._buffer(f"{file}/{name}", tensor) for name, tensor in tensors.items()}
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for name, tensor in tensors.items():
            if pins_host_memory(tensor.device):
                stream = streams.get(tensor.device)
                if stream is None:
                    stream = streams[tensor.device] = torch.cuda.Stream(tensor.device)
                    stream.wait_stream(torch.cuda.current_stream(tensor.device))
                with torch.cuda.stream(stream):
                    copies[name].copy_(tensor, non_blocking=True)
            elif tensor.is_contiguous():
                # NumPy copies in this thread alone; torch would use more threads, which compete
                # with training's.
                np.copyto(np.asarray(tensor_bytes(copies[name])), np.asarray(tensor_bytes(tensor)))
            else:
                copies[name].copy_(tensor)
        for stream in streams.values():
            stream.synchronize()
        return copies

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            pinned = pins_host_memory(like.device)
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer
