"""Computes rotary positions (Su et al., 2021, arXiv:2104.09864). As in Hugging Face, features i and i + D/2 pair up."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(position_ids: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of positions int64 [B, S], each [B, 1, S, D].

    Args:
        theta: The angle of position p and feature i is p * theta^(-2i / D), in fp32.
        dtype: The dtype of the result.
    """
    exponents = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    angles = position_ids[:, None, :, None].float() * (1.0 / theta**exponents)  # [B, 1, S, D/2]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries or keys [B, N, S, D] to their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
