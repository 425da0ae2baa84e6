"""Makes a batch of prompts of several lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Returns left-padded token ids of several prompts and their mask, int64 [B, T] each."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
