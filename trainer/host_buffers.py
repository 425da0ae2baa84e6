"""CPU memory that snapshots are copied to, the same for every save."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostBuffers:
    """A tensor for each name, made when it is first needed: fresh memory costs more than copying into it.

    Beside a GPU it is pinned, so that all copies run at the bus's speed and are waited for once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies of `tensors`, which are valid until the next call for this file."""
        copies = {}
        on_gpu = False
        for name, tensor in tensors.items():
            key = f"{file}/{name}"
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[key] = buffer
            copies[name] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
            on_gpu |= tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        return copies
