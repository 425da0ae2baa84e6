"""The attention softmax, with dropout that no tensor-parallel layout changes."""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import Dropout


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, dropout: Dropout | None = None
) -> Tensor:
    """softmax(scale * scores) over the allowed keys, in fp32, then dropout.

    scores: [B, Np, Sq, Sk]. mask: bool, broadcastable to scores, True where a query may attend; a row that may attend
    to nothing gives zeros. dropout: a `Dropout(p, split_dim=1, mesh=mesh)`, since the heads are split. Returns [B,
    Np, Sq, Sk] in the dtype of scores.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if mask is None:
        probabilities = wide.softmax(-1)
    else:
        # The lowest finite number instead of -inf keeps a row without any key finite, in backward too.
        lowest = torch.finfo(wide.dtype).min
        probabilities = wide.masked_fill(~mask, lowest).softmax(-1).masked_fill(~mask, 0)
    probabilities = probabilities.to(scores.dtype)
    return probabilities if dropout is None else dropout(probabilities)
