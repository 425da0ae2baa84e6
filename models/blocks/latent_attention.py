"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1).

The keys and values of all heads are made from one latent vector a position, and from one rotated
key that all heads share. A cache keeps these two alone: R + Dr numbers a position, whatever the
number of heads, on every tensor-parallel rank.

    latent, k_rot = split(x W_a)          # [B, S, R], [B, S, Dr]
    k_nope, v = split(norm(latent) W_b)   # of each head [Dn], [Dv]
    k = [k_nope, rotate(k_rot)],  q = [q_nope, rotate(q_rot)]

Decoding a few tokens, the heads' matrices move from the keys to the queries, and from the values to
the results (section 2.1.2), so that no key is made from the cache again:

    q_nope · (W_k latent) = (q_nope W_k) · latent,   p (latent W_v) = (p latent) W_v

There, attention has a single key-value head of R + Dr features.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import (
    ColumnParallelLinear,
    ParallelMesh,
    RMSNorm,
    RowParallelLinear,
    context_size,
    copy_to_tp,
    gather_sequence,
    tp_size,
)
from ...mpu.packed import PackedParameter
from ...ops import matmul
from ..parallel_config import ParallelConfig, layer_arguments
from .attention import CoreAttention, check_heads, merge_heads
from .cache import LayerKVCache
from .documents import Documents
from .linear import ReplicatedLinear
from .rotary import Rotary, rotate

# transformers' norms of the latent vectors have it, whatever the configuration says.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Attention of a sequence to itself, whose keys and values are compressed.

    The projections to latent vectors are replicated, and those from them are split by heads. Under
    sequence parallelism the ranks gather latent vectors, which are smaller than hidden states.

    Args:
        query_rank: The width of the queries' latent vector; None for none: queries are made from x.
        latent_rank: R.
        nope_size: Dn, the features of a head's queries and keys that are not rotated.
        rope_size: Dr, those that are.
        value_size: Dv.
        bias: Whether the projections to latent vectors, and the output, have biases.
        scale: Multiplies the scores.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        query_rank: int | None,
        latent_rank: int,
        nope_size: int,
        rope_size: int,
        value_size: int,
        bias: bool,
        scale: float,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.latent_rank = latent_rank
        self.nope_size = nope_size
        self.rope_size = rope_size
        self.value_size = value_size
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        shared = layer_arguments(mesh, parallel_config)
        query_size = nope_size + rope_size
        by_head: dict[str, Any] = {"bias": False, "unit": query_size, **shared}
        self.query: ColumnParallelLinear | None = None
        self.query_a: ReplicatedLinear | None = None
        self.query_norm: RMSNorm | None = None
        self.query_b: ColumnParallelLinear | None = None
        if query_rank is None:
            self.query = ColumnParallelLinear(hidden_size, num_heads * query_size, **by_head)
        else:
            self.query_a = ReplicatedLinear(hidden_size, query_rank, bias=bias, **shared)
            self.query_norm = RMSNorm(query_rank, LATENT_NORM_EPS, **shared)
            self.query_b = ColumnParallelLinear(query_rank, num_heads * query_size, **by_head)
        self.latent = ReplicatedLinear(hidden_size, latent_rank + rope_size, bias=bias, **shared)
        self.latent_norm = RMSNorm(latent_rank, LATENT_NORM_EPS, **shared)
        self.key_value = ColumnParallelLinear(
            latent_rank,
            num_heads * (nope_size + value_size),
            bias=False,
            unit=nope_size + value_size,
            **shared,
        )
        core: dict[str, Any] = {
            "scale": scale,
            "softcap": None,
            "mesh": mesh,
            "parallel_config": parallel_config,
        }
        self.core = CoreAttention(num_heads, num_heads, dropout=dropout, **core)
        # Of decoding, in which nothing is dropped.
        self.latent_core = CoreAttention(num_heads, 1, dropout=0.0, **core)
        self.output = RowParallelLinear(
            num_heads * value_size, hidden_size, bias=bias, unit=value_size, **shared
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Documents | None = None,
        *,
        causal: bool = False,
        cache: LayerKVCache | None = None,
        rotary: Rotary,
    ) -> Tensor:
        """Returns [B, S, H]. The arguments are those of `SelfAttention`.

        Args:
            cache: The normalized latent vectors of M earlier positions, [B, 1, M, R], as its keys,
                and their rotated keys, [B, 1, M, Dr], as its values.
            rotary: Of Dr features.
        """
        latent, k_rot = torch.split(self.latent(x), [self.latent_rank, self.rope_size], dim=-1)
        latent = self.latent_norm(latent)
        if self.sequence_parallel:
            k_rot = gather_sequence(k_rot, self.mesh)
        else:
            k_rot = copy_to_tp(k_rot, self.mesh)
        q = self.make_queries(x)
        q_nope, q_rot = torch.split(q, [self.nope_size, self.rope_size], dim=-1)
        q_rot, k_rot = rotate(q_rot, k_rot.unsqueeze(1), rotary)  # [B, Np or 1, S, Dr]
        if cache is not None:
            kept, k_rot = cache.extend(latent.unsqueeze(1), k_rot)  # [B, 1, M + S, R or Dr]
            latent = kept.squeeze(1)
            if isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape[-1] > k_rot.shape[2]:
                mask = mask[..., -k_rot.shape[2] :]
            if self.attends_to_latents(q):
                return self.attend_to_latents(q_nope, q_rot, latent, k_rot, mask, causal)
        k_nope, v = self.make_keys_and_values(latent)
        q = join_features(q_nope, q_rot)  # [B, Np, S, Dn + Dr]
        k = join_features(k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1))
        attended = self.core(*pad_heads(q, k, v), mask, None, causal)
        return self.output(merge_heads(attended[..., : self.value_size]))

    def make_queries(self, x: Tensor) -> Tensor:
        """Returns the queries [B, Np, S, Dn + Dr] of x [B, S, H], or [B, S/tp, H] under sequence
        parallelism.
        """
        if self.query is not None:
            q = self.query(x)
        else:
            assert self.query_a is not None
            assert self.query_norm is not None
            assert self.query_b is not None
            q = self.query_b(self.query_norm(self.query_a(x)))
        return torch.unflatten(q, -1, (-1, self.nope_size + self.rope_size)).transpose(1, 2)

    def make_keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each head's keys [B, Np, S, Dn] and values [B, Np, S, Dv] of normalized latent
        vectors [B, S, R], or [B, S/tp, R] under sequence parallelism.
        """
        key_value = self.key_value(latent)
        key_value = torch.unflatten(key_value, -1, (-1, self.nope_size + self.value_size))
        k, v = torch.split(key_value.transpose(1, 2), [self.nope_size, self.value_size], dim=-1)
        return k, v

    def attends_to_latents(self, q: Tensor) -> bool:
        """Returns whether few queries [B, Np, S, Dn + Dr] attend to the cache as it is.

        It needs fewer products then. In a long prompt, making the keys is cheaper.
        """
        weight = self.key_value.weight
        is_plain = not isinstance(weight, PackedParameter) and not hasattr(
            self.key_value, "adapter"
        )
        needs_keys = torch.is_grad_enabled() or self.core.dropout.drops
        if needs_keys or not is_plain or context_size(self.mesh) > 1:
            return False
        made = self.latent_rank * (self.nope_size + self.value_size)
        longer_scores = 2 * self.latent_rank - self.nope_size - self.value_size
        return q.shape[2] * longer_scores < made

    def attend_to_latents(
        self,
        q_nope: Tensor,
        q_rot: Tensor,
        latent: Tensor,
        k_rot: Tensor,
        mask: Tensor | Documents | None,
        causal: bool,
    ) -> Tensor:
        """Returns [B, S, H], of queries that attend to latent vectors [B, M + S, R].

        Args:
            q_nope, q_rot: [B, Np, S, Dn] and [B, Np, S, Dr].
            k_rot: [B, 1, M + S, Dr].
        """
        by_head = self.key_value.weight.to(q_nope.dtype)
        by_head = by_head.view(-1, self.nope_size + self.value_size, self.latent_rank)
        # [Np, Dn or Dv, R]
        w_k, w_v = torch.split(by_head, [self.nope_size, self.value_size], dim=1)
        q = torch.cat([matmul(q_nope, w_k[None]), q_rot], dim=-1)  # [B, Np, S, R + Dr]
        # The rotated keys are weighted too, and cut off, so that keys and values are one tensor.
        k = torch.cat([latent.unsqueeze(1), k_rot], dim=-1)  # [B, 1, M + S, R + Dr]
        attended = self.latent_core(q, k, k, mask, None, causal)[..., : self.latent_rank]
        return self.output(merge_heads(matmul(attended, w_v.mT[None])))


def join_features(first: Tensor, second: Tensor) -> Tensor:
    """Returns the features of both, [B, N, S, D1 + D2].

    It is [B, S, N, D1 + D2] in memory: so attention's output is too, and needs no copy to merge its
    heads.
    """
    return torch.cat([first.transpose(1, 2), second.transpose(1, 2)], dim=-1).transpose(1, 2)


def pad_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values with heads of one size, which attention's kernels need; the
    added features are zeros.
    """
    size = max(q.shape[-1], v.shape[-1])
    padded: list[Tensor] = []
    for x in (q, k, v):
        missing = size - x.shape[-1]
        if missing:
            x = F.pad(x.transpose(1, 2), (0, missing)).transpose(1, 2)
        padded.append(x)
    return padded[0], padded[1], padded[2]
