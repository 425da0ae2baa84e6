"""Multi-head attention whose heads are split over the tensor-parallel ranks."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import (
    ColumnParallelLinear,
    Dropout,
    ParallelMesh,
    RowParallelLinear,
    checkpoint,
    scaled_masked_softmax,
    tp_size,
)
from .execution import Execution


class SelfAttention(nn.Module):
    """softmax(q·kᵀ·scale + mask)·v with a fused, bias-carrying qkv product [Q|K|V] and an output product.

    Heads are whole on a rank; ValueError where the tensor-parallel size does not divide them.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        scale: float,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        execution: Execution,
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.head_size = hidden_size // num_heads
        self.scale = scale
        self.dropout = Dropout(dropout, split_dim=1, mesh=mesh)
        self.recompute_core = execution.recompute == "selective"
        sequence_parallel = execution.sequence_parallel
        self.qkv = ColumnParallelLinear(
            hidden_size,
            3 * hidden_size,
            groups=(hidden_size,) * 3,
            unit=self.head_size,
            sequence_parallel=sequence_parallel,
            mesh=mesh,
        )
        self.output = RowParallelLinear(
            hidden_size, hidden_size, unit=self.head_size, sequence_parallel=sequence_parallel, mesh=mesh
        )

    def forward(self, x: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """x: [B, S, H]. mask: bool, broadcastable to [B, Np, S, S], True where attended; None for all.

        causal without a mask lets a position see itself and those before it.
        """
        q, k, v = (self.split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))  # [B, Np, S, D]
        core = partial(checkpoint, self.attend) if self.recompute_core else self.attend
        y = core(q, k, v, mask, causal)
        return self.output(y.transpose(1, 2).flatten(2))  # [B, S, H]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q, k, v: [B, Np, S, D]; returns [B, Np, S, D]."""
        if not self.training or self.dropout.p == 0:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, is_causal=causal and mask is None
            )
        if causal and mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        # The probabilities are written out for the dropout mask, which does not depend on the layout.
        return scaled_masked_softmax(q @ k.mT, mask, scale=self.scale, dropout=self.dropout) @ v

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def causal_mask(attention_mask: Tensor | None, sequence_length: int) -> Tensor | None:
    """What a causal model's queries see: None without padding, else bool [B, 1, S, S].

    attention_mask: [B, S], nonzero for tokens and 0 for padding, as in transformers.
    """
    if attention_mask is None:
        return None
    causal = torch.ones(sequence_length, sequence_length, dtype=torch.bool, device=attention_mask.device).tril()
    return causal & attention_mask.bool()[:, None, None, :]


def check_heads(num_heads: int, tensor_parallel_size: int) -> None:
    if num_heads % tensor_parallel_size:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"{num_heads} attention heads cannot be split {tensor_parallel_size} ways; "
            f"use a model-parallel size of {', '.join(map(str, fitting))}"
        )
