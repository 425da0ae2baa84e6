"""CPU memory that snapshots are copied to, the same for every save."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.tensor_reader import tensor_bytes


class StagingBuffers:
    """A tensor for each name, made when it is first needed: fresh memory costs more than copying into it.

    Beside a GPU it is pinned, so that all copies run at the bus's speed and are waited for once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies of `tensors`, which are valid until the next call for this file.

        From a GPU they are made on a stream of their own, behind what the current one has been given so far.
        """
        copies = {name: self._buffer(f"{file}/{name}", tensor) for name, tensor in tensors.items()}
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                stream = streams.get(tensor.device)
                if stream is None:
                    stream = streams[tensor.device] = torch.cuda.Stream(tensor.device)
                    stream.wait_stream(torch.cuda.current_stream(tensor.device))
                with torch.cuda.stream(stream):
                    copies[name].copy_(tensor, non_blocking=True)
            elif tensor.is_contiguous():
                # In this thread alone: torch would start others, which get in the way of the step's.
                np.copyto(np.asarray(tensor_bytes(copies[name])), np.asarray(tensor_bytes(tensor)))
            else:
                copies[name].copy_(tensor)
        for stream in streams.values():
            stream.synchronize()
        return copies

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[key] = buffer
        return buffer
