"""Checks token ids and labels before they are used as indices."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.device import host_can_read, traces_whole_program


def check_ids(ids: Tensor, count: int, what: str) -> None:
    """Checks that all ids are in [0, count); `what` names them in the error.

    On an accelerator, reading the ids would stall the host. There, and in an exported program, the
    check runs on the device and fails like an out-of-range index.

    Raises:
        ValueError: An id on a CPU is outside the range.
    """
    inside = ids.clamp(0, count - 1) == ids
    if not host_can_read(ids) or traces_whole_program():
        torch.ops.aten._assert_async(inside.all())
    elif not inside.all():
        raise ValueError(f"{what} {ids[~inside][0]} is outside 0..{count - 1}")
