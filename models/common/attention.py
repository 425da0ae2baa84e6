"""Multi-head attention whose heads are split over the tensor-parallel ranks."""

from __future__ import annotations

from typing import ClassVar

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
from ...ops import in_inference_mode, product
from .cache import LayerKVCache, fold_beams, unfold_beams
from .heads import merge_heads, split_fused_heads, split_heads
from .masks import lower_triangular_mask
from .parallel_config import ParallelConfig

MAX_EAGER_SCORES = 512 * 512  # of a head, where `eager_beats_sdpa`


class CoreAttention(nn.Module):
    """softmax(scale · q·kᵀ + position_bias, over the keys that the mask shows)·v, of this rank's heads.

    A query that sees no key gets zeros, as in `scaled_dot_product_attention`. Selective recomputation keeps only q,
    k and v for the backward pass.
    """

    def __init__(
        self, *, scale: float, dropout: float, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = Dropout(dropout, split_dim=1, mesh=mesh)
        self.recompute = parallel_config.recompute == "selective"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_bias: Tensor | None, causal: bool
    ) -> Tensor:
        """q: [B, Np, Sq, D]; k, v: [B, Np, Sk, D]; returns [B, Np, Sq, D]. The other arguments: `SelfAttention`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.attend, q, k, v, mask, position_bias, causal)
        return self.attend(q, k, v, mask, position_bias, causal)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_bias: Tensor | None, causal: bool
    ) -> Tensor:
        causal = causal and mask is None and q.shape[2] > 1  # the last query sees every key
        if mask is None and not causal and in_inference_mode():
            mask, position_bias = position_bias, None  # a mask of numbers is added, and no gradient is wanted
        if position_bias is None and not self.dropout.drops and not eager_beats_sdpa(q, k):
            if causal and q.shape[2] != k.shape[2]:
                mask, causal = lower_triangular_mask(q.shape[2], k.shape[2], q.device), False
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, is_causal=causal)
        # The probabilities are written out: for the gradient of a trained bias, for a dropout mask that does not
        # depend on the layout, or for speed.
        scores = product(q, k.mT)  # [B, Np, Sq, Sk]
        weights = scaled_masked_softmax(
            scores, mask, position_bias, scale=self.scale, causal=causal, dropout=self.dropout
        )
        return product(weights, v)


class Attention(nn.Module):
    """Base of both kinds: the input projections, the attention core and the output projection.

    A subclass lists its input projections in `projections`: name -> number of blocks that are stacked in the weight.

    Args:
        head_size: hidden_size / num_heads by default.
        bias: whether the projections have biases.

    Raises:
        ValueError: the tensor-parallel size does not divide the number of heads; a head is never split.
    """

    projections: ClassVar[dict[str, int]]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_size: int | None = None,
        bias: bool = True,
        scale: float,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.head_size = head_size or hidden_size // num_heads
        inner_size = num_heads * self.head_size
        shared = {
            "bias": bias,
            "unit": self.head_size,
            "sequence_parallel": parallel_config.sequence_parallel,
            "mesh": mesh,
        }
        self.core = CoreAttention(scale=scale, dropout=dropout, mesh=mesh, parallel_config=parallel_config)
        for name, blocks in self.projections.items():
            groups = (inner_size,) * blocks if blocks > 1 else None
            self.add_module(name, ColumnParallelLinear(hidden_size, blocks * inner_size, groups=groups, **shared))
        self.output = RowParallelLinear(inner_size, hidden_size, **shared)


class SelfAttention(Attention):
    """Attention of a sequence to itself, with a fused qkv product [Q|K|V]."""

    projections: ClassVar = {"qkv": 3}
    qkv: ColumnParallelLinear

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        *,
        causal: bool = False,
        memory: Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]

        mask: bool, broadcastable to [B, Np, S, S], True where attended; None for all.
        position_bias: [1 or B, Np, S, S], added to the scaled scores; it may be trained.
        causal: without a mask, lets a position see itself and those before it.
        memory: [B, M, H] of the positions before x, which are attended too; the keys are then M + S. Not under
            sequence parallelism, where x is a part of the sequence.
        cache: the keys and values of M earlier positions, to which those of x are added; the keys are then M + S.
        """
        qkv = self.qkv(x if memory is None else torch.cat([memory, x], dim=1))
        q, k, v = split_fused_heads(qkv, 3, self.head_size)  # [B, Np, S, D]
        if memory is not None:
            q = q[:, :, memory.shape[1] :]
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.output(merge_heads(self.core(q, k, v, mask, position_bias, causal)))


class CrossAttention(Attention):
    """Attention of one sequence to another, with a query product and a fused [K|V] product."""

    projections: ClassVar = {"query": 1, "key_value": 2}
    query: ColumnParallelLinear
    key_value: ColumnParallelLinear

    def forward(
        self, x: Tensor, source: Tensor, mask: Tensor | None = None, cache: LayerKVCache | None = None
    ) -> Tensor:
        """x: [B, S, H]; source: [B, T, H], what is attended; mask: bool, broadcastable to [B, Np, S, T].

        cache: keeps the source's keys and values at the first call, which later ones use. Then x may have n rows for
        each of the source's, one after another, and mask must be the same for all queries.
        """
        q = split_heads(self.query(x), self.head_size)  # [B, Np, S, D]
        if cache is not None and cache.length:
            k, v = cache.filled()
        else:
            k, v = split_fused_heads(self.key_value(source), 2, self.head_size)
            if cache is not None:
                k, v = cache.extend(k, v)
        q, copies = fold_beams(q, k.shape[0])
        return self.output(merge_heads(unfold_beams(self.core(q, k, v, mask, None, False), copies)))


def eager_beats_sdpa(q: Tensor, k: Tensor) -> bool:
    """Whether two matrix products and a softmax beat `scaled_dot_product_attention`, forward and backward.

    They do for 16-bit types on a CPU: 12 ms against 26 for 4 × 12 heads of 64 at 256 positions, 53 against 87 at 512.
    Longer rows would cost too much memory.
    """
    short = q.shape[2] * k.shape[2] <= MAX_EAGER_SCORES
    return q.is_cpu and q.dtype.itemsize == 2 and short and torch.is_grad_enabled() and q.requires_grad


def check_heads(num_heads: int, tensor_parallel_size: int) -> None:
    if num_heads % tensor_parallel_size:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"{num_heads} attention heads cannot be split {tensor_parallel_size} ways; "
            f"use a model-parallel size of {', '.join(map(str, fitting))}"
        )
