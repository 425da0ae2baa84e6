"""Attention of the encoder of LongT5 (Guo et al., 2021, "LongT5: Efficient Text-To-Text Transformer
for Long Sequences", arXiv:2112.07916, section 3.1).

A sequence is cut into blocks of L = radius + 1 positions. The queries of a block see the keys of
their own block and of both neighbors, of which a mask leaves those at most `radius` away. So the
scores of S queries are [S, 3L], and memory grows with S and not with its square.

With transient-global attention, each query also sees G = S // g keys and values of sums: those of
the normalized states of each g consecutive tokens, which each layer adds up anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...mpu import ParallelMesh, RMSNorm, checkpoint, reduce_scatter_sequence, tp_rank, tp_size
from ...mpu.dropout import AttentionPlace
from ...ops.attention import suits_tiles
from ...ops.dropout_mask import keys_from_row
from ...ops.softmax import lay_out_diagonals
from ..blocks.attention import SelfAttention, attention_record, merge_heads, split_fused_heads
from ..blocks.relative_bias import RelativeBias, relative_buckets
from ..parallel_config import ParallelConfig, layer_arguments


class LocalPattern(NamedTuple):
    """What the blocks of an encoder share in a call: which keys a query attends to, and their bias.

    There are n blocks of L positions in each of B sequences of S positions, whose last block may be
    filled up. K = 3L + G.

    Attributes:
        length: L.
        mask: bool [B·n, 1, L, K], True where a query attends to a key.
        bias: Added to the scores, [B·n or 1, Np, L, K], or of each distance, [Np, 4L - 1], where
            attention takes it so (see `suits_tiles`).
        members: [B, G, S] in the model's dtype, 1 where a position is part of a sum; None
            without sums.
    """

    length: int
    mask: Tensor
    bias: Tensor
    members: Tensor | None


def local_pattern(
    size: Sequence[int], length: int, keys: Tensor | None, bias: RelativeBias
) -> LocalPattern:
    """Returns the pattern of local attention.

    Args:
        size: B and S.
        length: The positions L of a block; a query attends to keys at most L - 1 away.
        keys: bool [B, S], False for padding; None for none.
        bias: That of the distances between queries and keys.
    """
    device = bias.weight.device
    total = size[1]
    blocks = -(-total // length)
    # Query i of a block is at position L + i of the three blocks of its keys.
    distances = torch.arange(1 - 2 * length, 2 * length, device=device)
    buckets = relative_buckets(distances, bias.buckets, bias.max_distance, bias.bidirectional)
    biases = bias.look_up(buckets)  # [Np, 4L - 1]
    places = torch.arange(3 * length, device=device)
    is_near = (places - length - places[:length, None]).abs() < length  # [L, 3L]
    if keys is None:
        keys = torch.ones(1, total, dtype=torch.bool, device=device)
    around = F.pad(keys, (length, (blocks + 1) * length - total)).unfold(1, 3 * length, length)
    mask = (is_near & around[:, :, None]).expand(size[0], -1, -1, -1)  # [B, n, L, 3L]
    if not suits_tiles(length, 3 * length, device.type, biases.itemsize):
        biases = lay_out_diagonals(biases, length, 3 * length)[None]  # [1, Np, L, 3L]
    return LocalPattern(length, mask.flatten(0, 1)[:, None], biases, None)


def with_sums(
    pattern: LocalPattern,
    size: Sequence[int],
    group: int,
    keys: Tensor | None,
    bias: RelativeBias,
    dtype: torch.dtype,
) -> LocalPattern:
    """Returns the pattern of transient-global attention, from that of local attention.

    As in transformers, positions are counted with padding, and the tokens behind the last whole
    group are part of that group's sum. Without a whole group, there is one sum that nothing sees.

    Args:
        group: The positions g of a sum.
        bias: That of the distances between a query's sum and another one.

    The other arguments are those of `local_pattern`.
    """
    length = pattern.length
    total = size[1]
    blocks = -(-total // length)
    sums = max(total // group, 1)
    device = bias.weight.device
    if keys is None:
        keys = torch.ones(1, total, dtype=torch.bool, device=device)
    places = torch.arange(total, device=device)
    numbers = torch.arange(sums, device=device)

    # The sum of each token, int64 [B, S]; -1 for padding, and where no group is whole.
    ends_group = places % group == group - 1
    last = (keys & ends_group).sum(1, keepdim=True) - 1
    own = torch.minimum((places // group).expand_as(keys), last).masked_fill(~keys, -1)
    own = own.expand(size[0], -1)
    members = (own[:, None] == numbers[:, None]).to(dtype)  # [B, G, S]

    # The bias of the distance of each sum to a query's, [B, S, Np, G].
    distances = torch.arange(1 - sums, sums, device=device)
    buckets = relative_buckets(distances, bias.buckets, bias.max_distance, bias.bidirectional)
    by_sums = lay_out_diagonals(bias.look_up(buckets), sums, sums)  # [Np, G, G]
    by_query = F.embedding(own.clamp(min=0), by_sums.transpose(0, 1).flatten(1))
    side = torch.unflatten(by_query, -1, (by_sums.shape[0], sums))

    # Both kinds of keys side by side, for each block.
    side = F.pad(side, (0, 0, 0, 0, 0, blocks * length - total))
    side = torch.unflatten(side, 1, (blocks, length)).transpose(2, 3).flatten(0, 1)
    local = pattern.bias
    if local.dim() == 2:
        local = lay_out_diagonals(local, length, 3 * length)[None]
    exists = numbers <= own.max(1, keepdim=True).values  # [B, G]
    exists = exists[:, None, None, None].expand(-1, blocks, 1, length, -1).flatten(0, 1)
    return LocalPattern(
        length,
        torch.cat([pattern.mask, exists], -1),
        torch.cat([local.expand(len(side), -1, -1, -1), side], -1),
        members,
    )


class LocalAttention(SelfAttention):
    """Attention to the neighbors of each position, and perhaps to sums of blocks of tokens."""

    def forward(  # type: ignore[override] - it has no cache, no memory and no rotation
        self,
        x: Tensor,
        pattern: LocalPattern,
        position_bias: None = None,
        *,
        causal: bool = False,
        cache: None = None,
    ) -> Tensor:
        """Returns [B, S, H], from [B, S, H] or [B, S/tp, H] under sequence parallelism."""
        q, k, v = split_fused_heads(self.qkv(x), self.heads["qkv"], self.head_size)
        keys, values = self.project_sums(x, pattern)
        arguments = (q, k, v, keys, values, pattern)
        if self.core.recompute and torch.is_grad_enabled():
            return self.output(checkpoint(self.attend, *arguments))
        return self.output(self.attend(*arguments))

    def project_sums(
        self, x: Tensor, pattern: LocalPattern
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the keys and values of sums, [B, Np, G, D] each; None without sums."""
        return None, None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sum_keys: Tensor | None,
        sum_values: Tensor | None,
        pattern: LocalPattern,
    ) -> Tensor:
        """Returns [B, S, Hp] of q, k, v [B, Np, S, D] and of the keys and values of sums."""
        batch, heads, total, _ = q.shape
        length = pattern.length
        blocks = -(-total // length)
        q = F.pad(q, (0, 0, 0, blocks * length - total))
        q = torch.unflatten(q, 2, (blocks, length)).transpose(1, 2).flatten(0, 1)
        k = self.find_keys(k, sum_keys, length)
        v = self.find_keys(v, sum_values, length)
        keys = None
        if self.core.dropout.drops:
            # A block is a row of its own, whose queries follow those of the blocks before it.
            firsts = torch.arange(0, blocks * length, length, device=q.device)
            own = self.core.dropout.keys(q.new_empty(batch, 1))
            keys = keys_from_row(own.repeat_interleave(blocks), firsts.repeat(batch))
        place = AttentionPlace(heads, 0, 0, keys)
        attended = self.core.attend_locally(q, k, v, pattern.mask, pattern.bias, False, place)
        record = attention_record.probabilities
        if record is not None:
            by_block = torch.unflatten(record[self.core], 0, (batch, blocks))
            record[self.core] = by_block.transpose(1, 2)  # [B, Np, n, L, K]
        attended = torch.unflatten(attended, 0, (batch, blocks)).transpose(1, 2).flatten(2, 3)
        return merge_heads(attended[:, :, :total])

    def find_keys(self, x: Tensor, sums: Tensor | None, length: int) -> Tensor:
        """Returns what the queries of each block see of keys or values, [B·n, Np, K, D].

        Args:
            x: [B, Np, S, D].
            sums: [B, Np, G, D].
        """
        total = x.shape[2]
        blocks = -(-total // length)
        x = F.pad(x, (0, 0, length, (blocks + 1) * length - total))
        around = x.unfold(2, 3 * length, length).transpose(1, 2).mT  # [B, n, Np, 3L, D]
        if sums is not None:
            around = torch.cat([around, sums[:, None].expand(-1, blocks, -1, -1, -1)], 3)
        return around.flatten(0, 1)

    def gather_probabilities(self, recorded: Tensor) -> Tensor:
        """Returns the probabilities of all heads, as transformers has them: [B, n, N, L, K]."""
        return super().gather_probabilities(recorded).transpose(1, 2)


class TransientGlobalAttention(LocalAttention):
    """Local attention that also attends to sums of blocks of tokens, which have a norm."""

    def __init__(
        self,
        size: int,
        *args: Any,
        eps: float,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
        **kwargs: Any,
    ) -> None:
        super().__init__(size, *args, mesh=mesh, parallel_config=parallel_config, **kwargs)
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        self.global_norm = RMSNorm(size, eps, **layer_arguments(mesh, parallel_config))

    def project_sums(
        self, x: Tensor, pattern: LocalPattern
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        members = pattern.members
        assert members is not None
        sums = members.shape[1]
        if self.sequence_parallel:
            # Each rank adds up its tokens, and gets a part of the sums of all ranks.
            first = tp_rank(self.mesh) * x.shape[1]
            own = torch.matmul(members[:, :, first : first + x.shape[1]], x)
            missing = -sums % tp_size(self.mesh)
            added = reduce_scatter_sequence(F.pad(own, (0, 0, 0, missing)), self.mesh)
        else:
            added = torch.matmul(members, x)  # [B, G, H]
        projected = self.qkv(self.global_norm(added))[:, :sums]
        _, keys, values = split_fused_heads(projected, self.heads["qkv"], self.head_size)
        return keys, values
