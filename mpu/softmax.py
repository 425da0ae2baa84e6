"""The attention softmax, with dropout that no tensor-parallel layout changes."""

from __future__ import annotations

from torch import Tensor

from ..ops import masked_softmax
from .dropout import Dropout


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dropout: Dropout | None = None,
) -> Tensor:
    """softmax(scale * scores + bias) over the allowed keys, in fp32, then dropout.

    scores: [B, Np, Sq, Sk]. mask: broadcastable to scores; bool, True where a query may attend, or added. A row that
    may attend to nothing gives zeros. bias: broadcastable, trained. causal: query i sees the keys j <= i + Sk - Sq.
    dropout: a `Dropout(p, split_dim=1, mesh=mesh)`, since the heads are split. Returns [B, Np, Sq, Sk] in the dtype
    of scores.
    """
    dropped = {"dropout": dropout.p, **dropout.place(scores)} if dropout is not None and dropout.drops else {}
    return masked_softmax(scores, mask, bias, scale=scale, causal=causal, **dropped)
