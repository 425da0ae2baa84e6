"""Pools the hidden states of a text's tokens to one embedding, as sentence-transformers does."""

from __future__ import annotations

import torch
from torch import Tensor

# The name of each pooling in the configuration of sentence-transformers' Pooling module.
POOLING_MODES: dict[str, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
}


def pool(hidden: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """Returns the embeddings [R, H] of hidden states [R, S, H].

    Args:
        attention_mask: int64 [R, S], 1 on tokens and 0 on the padding after them. The mean and the
            last token of a text without tokens are zeros.
        pooling: "mean", the first ("cls") or the "last" token, or "weighted_mean", whose n-th token
            has the weight n (Muennighoff, 2022).
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        count = attention_mask.sum(1)  # [R]
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, count - 1] * (count > 0)[:, None]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = attention_mask.to(wide)  # [R, S]
    if pooling == "weighted_mean":
        weights = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    weights = weights[..., None]
    sums = (hidden.to(wide) * weights).sum(1)
    return (sums / weights.sum(1).clamp(min=1e-9)).to(hidden.dtype)
