"""Self- and cross-attention, whose heads are split over the tensor-parallel ranks.

See masks.py for the masks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from math import lcm
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mpu import (
    ColumnParallelLinear,
    Dropout,
    ParallelMesh,
    RMSNorm,
    RowParallelLinear,
    Shard,
    checkpoint,
    context_rank,
    context_size,
    copy_to_tp,
    cut_sequence,
    divide,
    exchange_heads,
    gather_from_context,
    gather_from_tp,
    reduce_from_tp,
    restore_heads,
    scaled_masked_softmax,
    tp_rank,
    tp_size,
)
from ...mpu.division import find_first_unit
from ...mpu.dropout import AttentionPlace
from ...mpu.parameter import split_parameter
from ...mpu.ring import RingRules, balance_chunks, restore_chunks, ring_attention
from ...ops import (
    attention,
    attention_with_sinks,
    empty_pooled,
    few_queries_attention,
    in_inference_mode,
    matmul,
    varlen_attention,
)
from ...ops.attention import cap_scores, eager_beats_sdpa, lacks_fused_attention, suits_tiles
from ...ops.autograd import Function, once_differentiable
from ...ops.device import can_overwrite_gradients, writes_gradients_in_place
from ...ops.dropout_mask import keys_from_row
from ...ops.softmax import lay_out_diagonals
from ...ops.varlen_attention import suits_varlen
from ..parallel_config import ContextExchange, LayerArguments, ParallelConfig
from .cache import LayerKVCache
from .documents import CrossDocuments, DocumentPlan, Documents, DocumentStarts
from .masks import AttentionMask, split_mask
from .padding import Tokens
from .rotary import Rotary, rotate

log = logging.getLogger("shardzoo.models")


class AttentionRecord:
    """Keeps the attention probabilities of a call that asks for them. Each process has one
    instance, `attention_record`.

    Attributes:
        probabilities: While a call is recorded, what each `CoreAttention` has computed, with
            dropout, for this rank's heads, [B, Np, Sq, Sk]; otherwise None.
    """

    def __init__(self) -> None:
        self.probabilities: dict[nn.Module, Tensor] | None = None

    @contextmanager
    def recording(self) -> Generator[dict[nn.Module, Tensor]]:
        """Records within the context."""
        before = self.probabilities
        self.probabilities = {}
        try:
            with torch.compiler.set_stance("force_eager"):
                yield self.probabilities
        finally:
            self.probabilities = before


attention_record = AttentionRecord()


class Attention(nn.Module):
    """Base of self- and cross-attention: input projections, attention core and output projection.

    A subclass lists its input projections in `projections`: name -> the blocks "q", "k" and "v"
    stacked in the weight.

    Args:
        num_key_value_heads: For grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245);
            num_heads by default.
        head_size: hidden_size / num_heads by default.
        qkv_bias, output_bias: Whether the input projections, and the output projection, have
            biases.
        softcap: The scores are softcap * tanh(scale · q·kᵀ / softcap), if it is given.
        sinks: See `CoreAttention`.
        source_size: The width of the sequence that cross-attention attends to; hidden_size by
            default.

    Raises:
        ValueError: The tensor-parallel size is larger than the number of heads; a head is never
            split.
    """

    projections: ClassVar[dict[str, str]]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_size: int | None = None,
        qkv_bias: bool = True,
        output_bias: bool = True,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
        sinks: bool = False,
        source_size: int | None = None,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        num_key_value_heads = num_key_value_heads or num_heads
        check_heads(num_heads, tp_size(mesh))
        if num_key_value_heads != num_heads and "qkv" not in self.projections:
            divide(
                num_key_value_heads, tp_size(mesh), "key-value heads of a projection of their own"
            )
        self.head_size = head_size or hidden_size // num_heads
        shared: dict[str, Any] = {
            "unit": self.head_size,
            "sequence_parallel": parallel_config.sequence_parallel,
            "mesh": mesh,
        }
        self.core = CoreAttention(
            num_heads,
            num_key_value_heads,
            scale=scale,
            softcap=softcap,
            dropout=dropout,
            sinks=sinks,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        heads = {"q": num_heads, "k": num_key_value_heads, "v": num_key_value_heads}
        self.heads: dict[str, tuple[int, ...]] = {}  # projection -> this rank's heads in each block
        for name, blocks in self.projections.items():
            widths = tuple(heads[block] * self.head_size for block in blocks)
            groups = widths if len(widths) > 1 else None
            # Where the ranks do not divide the key-value heads of grouped queries, they share them.
            shared_kv_groups: tuple[int, ...] = ()
            if "q" in blocks and num_key_value_heads < num_heads:
                shared_kv_groups = tuple(
                    number for number, block in enumerate(blocks) if block in "kv"
                )
            width = hidden_size
            if "q" not in blocks and source_size is not None:
                width = source_size
            projection = ColumnParallelLinear(
                width,
                sum(widths),
                bias=qkv_bias,
                groups=groups,
                shared_kv_groups=shared_kv_groups,
                **shared,
            )
            self.add_module(name, projection)
            computed = projection.shard.compute_ranges(tp_rank(mesh), tp_size(mesh))
            self.heads[name] = tuple((stop - start) // self.head_size for start, stop in computed)
        self.output = RowParallelLinear(
            num_heads * self.head_size, hidden_size, bias=output_bias, **shared
        )

    def gather_probabilities(self, recorded: Tensor) -> Tensor:
        """Returns what a call recorded for this rank's heads, [B, Np, Sq, Sk], for all heads."""
        return self.core.gather_heads(recorded)


class AllHeadsNorms(nn.Module):
    """RMSNorms of the queries, and of the keys, of all heads together.

    The heads are split over the tensor-parallel ranks, so the ranks' sums of squares are added, in
    one exchange of two numbers a position forward and one backward.

    Args:
        projection: The fused projection [Q|K|V] of the queries and keys.
        offset: What the norms add to their weights; see `RMSNorm`.

    Attributes:
        q_weight, k_weight: [Np · D] and [Kp · D].
    """

    def __init__(
        self,
        projection: ColumnParallelLinear,
        head_size: int,
        eps: float,
        offset: float | None = None,
    ) -> None:
        super().__init__()
        shard = projection.shard
        self.mesh = projection.mesh
        self.eps = eps
        self.offset = offset
        queries, keys, _ = shard.groups
        if shard.find_exchanged_groups(tp_size(self.mesh)):
            raise ValueError(
                f"{keys // head_size} key-value heads that are normalized together cannot be split "
                f"over {tp_size(self.mesh)} tensor-parallel ranks; use a divisor"
            )
        self.q_weight = split_parameter(Shard((queries,), 0, unit=head_size), self.mesh)
        self.k_weight = split_parameter(Shard((keys,), 0, unit=head_size), self.mesh)
        self.widths = (queries, keys)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalizes q [B, Np, S, D] and k [B, Kp, S, D]."""
        wide_q = q.to(torch.promote_types(q.dtype, torch.float32))
        wide_k = k.to(wide_q.dtype)
        sums = torch.stack([wide_q.square().sum((1, 3)), wide_k.square().sum((1, 3))])  # [2, B, S]
        # The sum goes into the norms of all ranks, so its gradient is the sum of theirs.
        sums = copy_to_tp(reduce_from_tp(sums, self.mesh), self.mesh)
        found: list[Tensor] = []
        weights = (self.q_weight, self.k_weight)
        for x, total, width, weight in zip(
            (wide_q, wide_k), sums.unbind(), self.widths, weights, strict=True
        ):
            scale = torch.rsqrt(total / width + self.eps)[:, None, :, None]
            by_head = weight.view(x.shape[1], 1, x.shape[3])
            if self.offset is None:
                found.append((x * scale).to(q.dtype) * by_head)
                continue
            wide_weight = by_head.to(x.dtype)
            if self.offset:
                wide_weight = wide_weight + self.offset
            found.append((x * scale * wide_weight).to(q.dtype))
        return found[0], found[1]


class SelfAttention(Attention):
    """Attention of a sequence to itself, with one fused projection [Q|K|V].

    Args:
        qk_norm_eps: The epsilon of an RMSNorm over the features of each query head, and of each key
            head, before they are rotated; None for no such norms.
        norm_offset: What these norms add to their weights; see `RMSNorm`.
        norms_all_heads: Whether that norm is over the features of all heads together.
        clip: The largest absolute value of queries, keys and values before they are rotated. The
            other arguments are those of `Attention`.
    """

    projections: ClassVar = {"qkv": "qkv"}
    qkv: ColumnParallelLinear

    def __init__(
        self,
        *args: Any,
        qk_norm_eps: float | None = None,
        norm_offset: float | None = None,
        norms_all_heads: bool = False,
        clip: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.clip = clip
        # Most layers change nothing here, and a call for each of them would cost the host time.
        self.normalizes = qk_norm_eps is not None or clip is not None
        self.qk_norms: AllHeadsNorms | None = None
        if qk_norm_eps is not None and norms_all_heads:
            self.qk_norms = AllHeadsNorms(self.qkv, self.head_size, qk_norm_eps, norm_offset)
            qk_norm_eps = None
        # Each rank has other heads, so the ranks' gradients of a norm's weight are summed.
        shared: LayerArguments = {"mesh": kwargs.get("mesh"), "sequence_parallel": True}
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(self.head_size, qk_norm_eps, offset=norm_offset, **shared)
            self.k_norm = RMSNorm(self.head_size, qk_norm_eps, offset=norm_offset, **shared)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Tokens | Documents | None = None,
        position_bias: Tensor | None = None,
        *,
        causal: bool = False,
        memory: Tensor | None = None,
        cache: LayerKVCache | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Returns [B, S, H]. With memory or a cache of M earlier positions there are M + S keys,
        else S.

        Args:
            x: [B, S, H].
            mask: bool, broadcastable to [B, Np, S, S], True where a query attends to a key; None
                for all; or prefixes; or `Tokens`, whose rows [T, 1, H] x and the result then are.
            position_bias: Added to the scaled scores, and perhaps trained: from `RelativeBias`, or
                [1 or B, Np, S, S].
            causal: Each position attends to itself and to earlier positions only, unless the mask
                is complete.
            memory: [B, M, H], the hidden states of the positions before x, which x attends to as
                well. Not supported under sequence parallelism, where x is a part of the sequence.
            cache: The keys and values of M earlier positions; those of x are appended to it.
            rotary: The rotation to the positions of x, from `rotary_embedding`; not supported with
                memory.
        """
        tokens, mask = split_mask(mask)
        qkv = self.qkv(x if memory is None else torch.cat([memory, x], dim=1))
        by_rows = tokens is not None and not causal and rotary is None
        if tokens is not None and by_rows and self.core.takes_rows(qkv, tokens, position_bias):
            # [T, Np or Kp, 1, D], of which the rows are taken for samples.
            q, k, v = split_fused_heads(qkv, self.heads["qkv"], self.head_size)
            if self.normalizes:
                q, k, v = self.normalize(q, k, v)
            attended = self.core.attend_to_rows(q, k, v, tokens, tokens.starts, position_bias)
            return self.output(merge_heads(attended))
        qkv = qkv if tokens is None else tokens.pad(qkv)
        q, k, v = split_fused_heads(qkv, self.heads["qkv"], self.head_size)  # [B, Np or Kp, S, D]
        if self.normalizes:
            q, k, v = self.normalize(q, k, v)
        if rotary is not None:
            q, k = rotate(q, k, rotary)
        if memory is not None:
            q = q[:, :, memory.shape[1] :]
        if cache is not None:
            k, v = cache.extend(k, v)
            if isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape[-1] > k.shape[2]:
                mask = mask[..., -k.shape[2] :]  # of a cache that keeps a sliding window alone
        merged = merge_heads(self.core(q, k, v, mask, position_bias, causal))
        return self.output(merged if tokens is None else tokens.unpad(merged))

    def normalize(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalizes and clips q [B, Np, S, D] and k, v [B, Kp, S, D], as far as this layer does."""
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        elif self.qk_norms is not None:
            q, k = self.qk_norms(q, k)
        if self.clip is not None:
            q = q.clamp(-self.clip, self.clip)
            k = k.clamp(-self.clip, self.clip)
            v = v.clamp(-self.clip, self.clip)
        return q, k, v


class CrossAttention(Attention):
    """Attention of one sequence to another, with projections of queries and, fused, of [K|V]."""

    projections: ClassVar = {"query": "q", "key_value": "kv"}
    query: ColumnParallelLinear
    key_value: ColumnParallelLinear

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | Tokens | Documents | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            source: [B, T, H], the sequence that x attends to.
            mask: bool, broadcastable to [B, Np, S, T]; or `Tokens`, whose rows the source then is.
            cache: The first call stores the source's keys and values in it, and later calls use
                them. With a cache, x may have n consecutive rows for each row of the source, and
                mask must be the same for all queries.
        """
        tokens, mask = split_mask(mask)
        q = torch.unflatten(self.query(x), -1, (-1, self.head_size))  # [B, S, Np, D]
        q = q.transpose(1, 2)  # [B, Np, S, D]
        if cache is not None and cache.length:
            k, v = cache.filled()
        else:
            if tokens is None:
                key_value = self.key_value(source)
            else:
                # An adapter of the projection drops a part of its inputs.
                has_adapter = hasattr(self.key_value, "adapter")
                with tokens.naming_rows() if has_adapter else nullcontext():
                    key_value = self.key_value(source)
                if cache is None and self.core.takes_rows(key_value, tokens, None):
                    k, v = split_fused_heads(key_value, self.heads["key_value"], self.head_size)
                    batch, _, length, _ = q.shape
                    starts = torch.arange(0, batch * length + 1, length, device=q.device)
                    # The queries have no padding: [B·S, Np, 1, D].
                    rows = q.transpose(1, 2).flatten(0, 1)[:, :, None]
                    attended = self.core.attend_to_rows(rows, k, v, tokens, starts, None)
                    merged = torch.unflatten(merge_heads(attended)[:, 0], 0, (batch, length))
                    return self.output(merged)
                key_value = tokens.pad(key_value)
            k, v = split_fused_heads(key_value, self.heads["key_value"], self.head_size)
            if cache is not None:
                k, v = cache.extend(k, v)
        q, copies = fold_beams(q, k.shape[0])
        attended = self.core(q, k, v, mask, None, False)
        return self.output(merge_heads(unfold_beams(attended, copies)))


class CoreAttention(nn.Module):
    """Computes softmax(scale · q·kᵀ + position_bias)·v for this rank's heads, over the keys that
    the mask allows. A soft cap keeps the scaled products between -cap and cap.

    A query without any allowed key gets zeros, as in `scaled_dot_product_attention`. Selective
    recomputation keeps only q, k and v for the backward pass, and so does attention in tiles.

    Args:
        sinks: Whether each head has a trained number, `self.sinks` [Np], that joins the softmax
            like the score of a key with the value zero (`ops/attention_sinks.py`).
    """

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        *,
        scale: float,
        softcap: float | None = None,
        dropout: float,
        sinks: bool = False,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        self.scale = scale
        if sinks and softcap is not None:
            raise ValueError("attention with sinks does not cap its scores; leave softcap out")
        self.softcap = softcap
        self.sinks = split_parameter(Shard((num_heads,), 0), mesh) if sinks else None
        self.dropout = Dropout(dropout, count=num_heads, mesh=mesh)
        first = find_first_unit(num_heads, tp_rank(mesh), tp_size(mesh))
        last = find_first_unit(num_heads, tp_rank(mesh) + 1, tp_size(mesh))
        counts = Counter(head * num_key_value_heads // num_heads for head in range(first, last))
        # The number of query heads of each of this rank's key-value heads; empty if the numbers are
        # equal.
        self.queries_per_kv: tuple[int, ...] = ()
        if len(set(counts.values())) > 1:
            self.queries_per_kv = tuple(counts.values())
        self.num_heads = num_heads
        self.mesh = mesh
        self.recompute = parallel_config.recompute == "selective"
        self.exchanges_heads = False
        if context_size(mesh) > 1:
            self.exchanges_heads = chooses_heads(num_heads, mesh, parallel_config.context_exchange)
        self.passes_keys_on = parallel_config.context_exchange == "ring"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Documents | None,
        position_bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Returns [B, Np, Sq, D]. The other arguments are as in `SelfAttention`.

        Under context parallelism, Sq and Sk are this rank's positions of q, k and v, and all
        positions of the mask and the bias.

        Args:
            q: [B, Np, Sq, D].
            k, v: [B, Kp, Sk, D]; each key-value head serves consecutive query heads.
        """
        if self.queries_per_kv:
            k = repeat_unequally(k, self.queries_per_kv)
            v = repeat_unequally(v, self.queries_per_kv)
        if isinstance(mask, Documents) and not can_plan(mask, q.shape[0]):
            mask = mask.to_tensor()
        # The ring separates documents of one sequence alone; between two, keys are gathered.
        uses_ring = self.passes_keys_on and not isinstance(mask, CrossDocuments)
        if uses_ring and context_size(self.mesh) > 1:
            bias_dim = 2 if position_bias is None else position_bias.dim()
            is_recorded = attention_record.probabilities is not None
            if bias_dim == 2 and not is_recorded and self.sinks is None:
                # It keeps no more than selective recomputation would.
                if isinstance(mask, Documents):
                    return self.attend_to_documents_in_ring(q, k, v, mask, position_bias, causal)
                return self.attend_in_ring(q, k, v, mask, position_bias, causal)
            log_gathering()
        splits_sequence = context_size(self.mesh) > 1
        if not splits_sequence and not isinstance(mask, Documents):
            return self.attend_locally(q, k, v, mask, position_bias, causal)
        attend = self.attend_to_gathered_keys
        if not splits_sequence:
            place = AttentionPlace(q.shape[1], 0, 0)
            within = partial(self.attend_within_documents, place=place)
            attend = cast(Callable[..., Tensor], within)  # the mask is of `Documents` here
        elif self.exchanges_heads:
            attend = self.attend_with_fewer_heads
        if self.recompute and torch.is_grad_enabled():
            # The backward pass exchanges again, so that no rank keeps what it has received.
            return checkpoint(attend, q, k, v, mask, position_bias, causal)
        return attend(q, k, v, mask, position_bias, causal)

    def attend_with_fewer_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Documents | None,
        position_bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Computes attention with all positions of 1/C of this rank's heads, after an exchange of
        heads with the other context-parallel ranks.
        """
        mesh = self.mesh
        assert mesh is not None
        heads = q.shape[1]
        share = heads // mesh.cp_size
        first = mesh.cp_rank * share
        # Fewer key-value heads than ranks are repeated, so that each rank gets those of its queries.
        multiple = lcm(k.shape[1], mesh.cp_size)
        repeated = multiple if heads % multiple == 0 else heads
        k = exchange_heads(repeat_heads(k, repeated), mesh)
        v = exchange_heads(repeat_heads(v, repeated), mesh)
        q = exchange_heads(q, mesh)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, first : first + share]
        if position_bias is not None:
            position_bias = position_bias.narrow(
                -2 if position_bias.dim() == 2 else 1, first, share
            )
        place = AttentionPlace(heads, first, 0)
        if isinstance(mask, Documents):
            attended = self.attend_within_documents(q, k, v, mask, position_bias, causal, place)
            return restore_heads(attended, mesh)
        return restore_heads(self.attend_locally(q, k, v, mask, position_bias, causal, place), mesh)

    def attend_in_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        position_bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Computes attention of this rank's positions, while the keys and values of the
        context-parallel ranks pass by.
        """
        mesh = self.mesh
        assert mesh is not None
        length = q.shape[2]
        prefix: Tensor | None = None
        if mask is not None and mask.dim() == 1:
            prefix = mask if causal else None
            mask = None
        elif mask is not None:
            mask = mask if mask.dim() == 4 else mask[None, None]
            causal = causal and mask.shape[-2] == 1  # the mask is complete
        dropped = self.dropout.attention_arguments(q, AttentionPlace(q.shape[1], 0, 0))
        rules = RingRules(
            scale=self.scale,
            softcap=self.softcap,
            queries=length * mesh.cp_size,
            causal=causal,
            prefix=prefix,
            mask=mask,
            **dropped,
            is_balanced=causal and length % 2 == 0,
        )
        if not rules.is_balanced:
            return ring_attention(q, k, v, position_bias, rules, mesh)
        heads = [q.shape[1], k.shape[1], v.shape[1]]
        q, k, v = torch.split(balance_chunks(torch.cat([q, k, v], 1), mesh), heads, 1)
        return restore_chunks(ring_attention(q, k, v, position_bias, rules, mesh), mesh)

    def attend_to_documents_in_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents,
        position_bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Computes attention of this rank's positions within documents: of those that lie here
        alone, and of those that ranks share while their keys and values pass by.
        """
        mesh = self.mesh
        assert mesh is not None
        batch, heads, length, _ = q.shape
        first = mesh.cp_rank * length
        # Both use the site's dropout once, so the keys are drawn here.
        keys = self.dropout.keys(q) if self.dropout.drops else None
        place = AttentionPlace(heads, 0, 0, keys)
        plan = documents.plan_alone(batch, first, first + length)
        shared = documents.find_shared(batch, length)
        passed: Tensor | None = None
        if shared or plan is None:
            rules = RingRules(
                scale=self.scale,
                softcap=self.softcap,
                queries=length * mesh.cp_size,
                causal=causal,
                mask=documents.keys,
                prefix=documents.find_prefixes(shared),
                **self.dropout.attention_arguments(q, place),
                documents=shared,
                reach=documents.reach,
            )
            passed = ring_attention(q, k, v, position_bias, rules, mesh)
        if plan is None:
            assert passed is not None
            return passed
        arguments = (q, k, v, plan, position_bias, causal, place)
        if self.recompute and torch.is_grad_enabled():
            alone = checkpoint(self.attend_by_plan, *arguments)
        else:
            alone = self.attend_by_plan(*arguments)
        if passed is None:
            rows = alone[plan.order]
        else:
            rows = passed.transpose(1, 2).flatten(0, 1).index_copy(0, plan.places, alone)
        return torch.unflatten(rows, 0, (batch, length)).transpose(1, 2)

    def attend_to_gathered_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Documents | None,
        position_bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Computes attention of this rank's positions, after it has got the keys and values of all
        context-parallel ranks.
        """
        mesh = self.mesh
        first = context_rank(mesh) * q.shape[2]
        end = first + q.shape[2]
        k = gather_from_context(k, mesh, 2)
        v = gather_from_context(v, mesh, 2)
        length = k.shape[2]
        if isinstance(mask, Documents):
            place = AttentionPlace(q.shape[1], 0, first)
            return self.attend_within_documents(q, k, v, mask, position_bias, causal, place)
        if causal and mask is not None and mask.dim() == 1:
            # The queries are not the last ones, as the prefix rule wants: the rules become a mask.
            queries = torch.arange(first, end, device=q.device)[:, None]
            keys = torch.arange(length, device=q.device)
            mask = (keys <= queries) | (keys < mask.view(-1, 1, 1, 1))  # [B, 1, Sq, Sk]
            causal = False
        elif mask is not None and mask.shape[-2] > 1:
            mask = cut_sequence(mask, mesh, -2)
            causal = False  # the mask is complete
        if causal:
            # Without the keys after its last query, a causal rank's queries are the last ones.
            k = k[:, :, :end]
            v = v[:, :, :end]
            mask = None if mask is None else mask[..., :end]
        if position_bias is not None and position_bias.dim() == 2:
            # Distances from this rank's last query to the first key, up to its first query and the
            # last key.
            skipped = (position_bias.shape[1] - length) - end + 1
            position_bias = position_bias[:, skipped : skipped + q.shape[2] + k.shape[2] - 1]
        elif position_bias is not None:
            position_bias = cut_sequence(position_bias, mesh, -2)[..., : k.shape[2]]
        place = AttentionPlace(q.shape[1], 0, first)
        return self.attend_locally(q, k, v, mask, position_bias, causal, place)

    def attend_within_documents(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents,
        position_bias: Tensor | None,
        causal: bool,
        place: AttentionPlace,
    ) -> Tensor:
        """Computes attention of the tokens of each document to those of the same one.

        The queries are those from `place.first_query` on; the keys are those of whole rows. The
        column of a dropout mask is the key's place in its document.
        """
        batch, _, length, _ = q.shape
        if self.dropout.drops:
            place = place._replace(keys=self.dropout.keys(q))
        has_all_queries = place.first_query == 0 and length == k.shape[2]
        if has_all_queries and self.takes_documents(q, position_bias):
            starts = documents.find_starts(batch)
            if starts is not None:
                return self.attend_from_starts(q, k, v, starts, position_bias, causal, place)
        plan = documents.plan(batch, place.first_query, place.first_query + length)
        rows = self.attend_by_plan(q, k, v, plan, position_bias, causal, place)[plan.order]
        return torch.unflatten(rows, 0, (batch, length)).transpose(1, 2)

    def takes_documents(self, q: Tensor, position_bias: Tensor | None) -> bool:
        """Whether a kernel computes documents one after another, without padding between them."""
        if self.softcap is not None or self.sinks is not None:
            return False
        if attention_record.probabilities is not None:
            return False
        by_distance = position_bias is None or position_bias.dim() == 2
        return by_distance and suits_varlen(q)

    def attend_from_starts(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: DocumentStarts,
        by_distance: Tensor | None,
        causal: bool,
        place: AttentionPlace,
    ) -> Tensor:
        """Returns the attention within documents, [B, Np, S, D].

        Args:
            by_distance: The relative bias of each distance of whole rows, [Np, 2 S - 1].
            place: With the keys of the samples, if there is dropout.
        """
        batch, _, length, _ = q.shape
        longest = documents.longest
        if by_distance is not None:
            by_distance = by_distance[:, length - longest : length + longest - 1]
        if place.keys is not None:
            own_keys = keys_from_row(place.keys[documents.samples], documents.firsts)
            place = place._replace(keys=own_keys)
        rows, own_k, own_v = (
            x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)
        )  # [B·S, Np or Kp, D]
        attended = varlen_attention(
            rows,
            own_k,
            own_v,
            documents.starts,
            documents.starts,
            max_queries=longest,
            max_keys=longest,
            scale=self.scale,
            relative_bias=by_distance,
            causal=causal,
            **self.dropout.attention_arguments(rows, place),
        )
        return torch.unflatten(attended, 0, (batch, length)).transpose(1, 2)

    def attend_by_plan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: DocumentPlan,
        position_bias: Tensor | None,
        causal: bool,
        place: AttentionPlace,
    ) -> Tensor:
        """Returns the attention of a plan's queries in the order of its places, [t, N, D].

        Args:
            place: With the keys of the samples, if there is dropout.
        """
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [B·S, N or K, D] each
        parts: list[Tensor] = []
        for part in plan.batches:
            own_q = rows[0][part.queries].transpose(1, 2)  # [n, N, Lq, D]
            own_k = rows[1][part.keys].transpose(1, 2)
            own_v = rows[2][part.keys].transpose(1, 2)
            bias = position_bias
            own_length = own_q.shape[2]
            if bias is not None and bias.dim() == 2:
                total = (bias.shape[1] + 1) // 2  # the tokens of a whole row
                skipped = total - (part.offset + own_length)
                bias = bias[:, skipped : skipped + own_length + own_k.shape[2] - 1]
            elif bias is not None:
                end = part.offset + own_length
                bias = bias[..., part.offset : end, : own_k.shape[2]]
            own_keys = None
            if place.keys is not None:
                own_keys = keys_from_row(place.keys[part.samples], part.first_queries)
            attended = self.attend_locally(
                own_q,
                own_k,
                own_v,
                part.mask,
                bias,
                causal,
                place._replace(first_query=0, keys=own_keys),
            )
            parts.append(attended.transpose(1, 2).flatten(0, 1)[part.kept])  # [t, N, D]
        return torch.cat(parts)

    def attend_locally(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        position_bias: Tensor | None,
        causal: bool,
        place: AttentionPlace | None = None,
    ) -> Tensor:
        """Computes attention with the keys that are here.

        Args:
            place: Which heads and queries these are, if they are not all of this rank's. For the
                others see `forward`.
        """
        if position_bias is not None and position_bias.dim() == 2 and place is not None:
            by_tiles = suits_tiles(q.shape[2], k.shape[2], q.device.type, q.dtype.itemsize)
            if not by_tiles:
                position_bias = lay_out_diagonals(position_bias, q.shape[2], k.shape[2])[None]
        attention_mask = AttentionMask.from_arguments(mask, causal, q.shape[2])
        if attention_record.probabilities is not None:
            if position_bias is not None and position_bias.dim() == 2:  # of each distance
                position_bias = lay_out_diagonals(position_bias, q.shape[2], k.shape[2])[None]
            return self.attend_eagerly(q, k, v, attention_mask, position_bias, place)
        if self.uses_tiles(q, k, position_bias):
            return self.attend_in_tiles(q, k, v, attention_mask, position_bias, place)
        if self.recompute and torch.is_grad_enabled() and place is None:
            return checkpoint(self.attend, q, k, v, attention_mask, position_bias)
        return self.attend(q, k, v, attention_mask, position_bias, place)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: AttentionMask,
        position_bias: Tensor | None,
        place: AttentionPlace | None = None,
    ) -> Tensor:
        """Returns [B, Np, Sq, D], by PyTorch's fused attention or by whole scores."""
        assert self.sinks is None  # which attention in tiles adds
        is_unmasked = attention_mask.mask is None and not attention_mask.causal
        may_add_bias = is_unmasked and self.softcap is None and in_inference_mode()
        if position_bias is not None and may_add_bias:
            # Without gradients, the bias can be a mask that fused attention adds to the scores.
            attention_mask = AttentionMask(position_bias)
            position_bias = None
        is_plain = position_bias is None and not self.dropout.drops
        if is_plain and in_inference_mode():
            few = few_queries_attention(
                q, k, v, *attention_mask, scale=self.scale, softcap=self.softcap
            )
            if isinstance(few, Tensor):
                return few
        if is_plain and self.softcap is None and not eager_beats_sdpa(q, k):
            is_causal = (
                attention_mask.mask is None
                and attention_mask.prefix is None
                and attention_mask.causal
                and q.shape[2] == k.shape[2]
            )
            mask = None
            if not is_causal:
                mask = attention_mask.to_tensor(q.shape[2], k.shape[2], q.device)
            is_grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                scale=self.scale,
                is_causal=is_causal,
                enable_gqa=is_grouped,
            )
        # Compute the probabilities explicitly, for one of four reasons: the gradient of a trained
        # bias, a soft cap, a dropout mask that does not depend on the layout, or speed.
        return self.attend_eagerly(q, k, v, attention_mask, position_bias, place)

    def attend_eagerly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: AttentionMask,
        position_bias: Tensor | None,
        place: AttentionPlace | None = None,
    ) -> Tensor:
        """Returns [B, Np, Sq, D], and keeps the probabilities if a call is recorded."""
        probabilities = self.compute_probabilities(q, k, attention_mask, position_bias, place)
        if attention_record.probabilities is not None:
            attention_record.probabilities[self] = probabilities
        return matmul(probabilities, repeat_heads(v, q.shape[1]))

    def compute_probabilities(
        self,
        q: Tensor,
        k: Tensor,
        attention_mask: AttentionMask,
        position_bias: Tensor | None,
        place: AttentionPlace | None,
    ) -> Tensor:
        """Returns the attention probabilities [B, Np, Sq, Sk], with dropout."""
        scores = matmul(q, repeat_heads(k, q.shape[1]).mT)
        scale = self.scale
        if self.softcap is not None:
            scores = cap_scores(scores, scale, self.softcap)
            scale = 1.0
        probabilities = scaled_masked_softmax(
            scores,
            attention_mask.mask,
            position_bias,
            scale=scale,
            causal=attention_mask.causal,
            prefix=attention_mask.prefix,
            dropout=self.dropout,
            place=place,
        )
        if self.sinks is None:
            return probabilities
        z = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scale
        visible = attention_mask.to_tensor(q.shape[2], k.shape[2], q.device)
        if visible is not None:
            z = z.masked_fill(~visible, float("-inf"))
        sinks = self.find_sinks(q, place).to(z.dtype)[:, None]
        kept = torch.sigmoid(z.logsumexp(-1) - sinks)  # [B, Np, Sq]
        return (probabilities * kept[..., None]).to(probabilities.dtype)

    def find_sinks(self, q: Tensor, place: AttentionPlace | None) -> Tensor:
        """Returns the sinks of the heads of q [B, N, Sq, D], which are perhaps not all of this
        rank's.
        """
        assert self.sinks is not None
        if place is None:
            return self.sinks
        return self.sinks.narrow(0, place.first_head, q.shape[1])

    def gather_heads(self, x: Tensor) -> Tensor:
        """Returns the heads of all ranks, [B, Np, ...] -> [B, N, ...]. Ranks may have unequal numbers."""
        if self.mesh is None or self.mesh.tp_size == 1:
            return x
        size = self.mesh.tp_size
        firsts = [find_first_unit(self.num_heads, rank, size) for rank in range(size + 1)]
        counts = [stop - start for start, stop in pairwise(firsts)]
        most = max(counts)
        missing = x.new_zeros(x.shape[0], most - x.shape[1], *x.shape[2:])
        gathered = gather_from_tp(torch.cat([x, missing], 1), self.mesh, 1)
        parts = torch.split(gathered, most, 1)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1)

    def takes_rows(self, x: Tensor, tokens: Tokens, position_bias: Tensor | None) -> bool:
        """Whether attention computes samples without padding from rows x [T, 1, ...]."""
        if tokens.starts is None or self.queries_per_kv or self.softcap is not None:
            return False
        if self.sinks is not None:
            return False
        by_distance = position_bias is None or position_bias.dim() == 2
        return by_distance and suits_varlen(x)

    def attend_to_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Tokens,
        query_starts: Tensor | None,
        by_distance: Tensor | None,
    ) -> Tensor:
        """Returns the attention of rows of queries to the tokens of their sample, [U, Np, 1, D].

        Args:
            q: [U, Np, 1, D].
            k, v: [T, Kp, 1, D], the rows of the tokens.
            query_starts: Where each sample's queries begin among the rows, int64 [B + 1].
            by_distance: As in `attend_in_tiles`.
        """
        batch, _, _, length = tokens.mask.shape
        assert query_starts is not None
        assert tokens.starts is not None
        rules: dict[str, Any] = {}
        if self.dropout.drops:
            place = AttentionPlace(q.shape[1], 0, 0, self.dropout.keys(tokens.mask))
            rules = self.dropout.attention_arguments(q, place)
        is_self_attention = query_starts is tokens.starts
        attended = varlen_attention(
            q[:, :, 0],
            k[:, :, 0],
            v[:, :, 0],
            query_starts,
            tokens.starts,
            max_queries=length if is_self_attention else q.shape[0] // batch,
            max_keys=length,
            scale=self.scale,
            relative_bias=by_distance,
            **rules,
        )
        return attended[:, :, None]

    def uses_tiles(self, q: Tensor, k: Tensor, position_bias: Tensor | None) -> bool:
        """Whether attention computes the scores in tiles (Dao et al., 2022, arXiv:2205.14135).

        Without gradients too, so that a pass that is repeated with them rounds alike. On an
        accelerator PyTorch's own fused attention serves where it can.
        """
        if position_bias is not None:
            return position_bias.dim() == 2  # as `RelativeBias` decided
        if self.sinks is not None:
            return True
        needed = self.dropout.drops or self.softcap is not None or lacks_fused_attention(q)
        return needed and suits_tiles(q.shape[2], k.shape[2], q.device.type, q.dtype.itemsize)

    def attend_in_tiles(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: AttentionMask,
        by_distance: Tensor | None,
        place: AttentionPlace | None = None,
    ) -> Tensor:
        """Returns [B, Np, Sq, D] without ever holding all scores.

        Args:
            by_distance: The relative bias of each distance, [Np, Sq + Sk - 1], from `RelativeBias`.
        """
        mask = attention_mask.mask
        if mask is not None and mask.dim() != 4:
            mask = mask[None, None]
        rules: dict[str, Any] = {
            "causal": attention_mask.causal,
            "prefix": attention_mask.prefix,
            "softcap": self.softcap,
            **self.dropout.attention_arguments(q, place),
        }
        if self.sinks is not None:
            assert by_distance is None
            del rules["softcap"]  # of which there is none
            sinks = self.find_sinks(q, place)
            return attention_with_sinks(q, k, v, sinks, scale=self.scale, mask=mask, **rules)
        return attention(q, k, v, scale=self.scale, mask=mask, relative_bias=by_distance, **rules)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeats each head consecutively: [B, Kp, S, D] -> [B, heads, S, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def repeat_unequally(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Repeats the heads of [B, Kp, S, D] consecutively, each as often as `counts` says."""
    return torch.cat(
        [
            head.expand(-1, count, -1, -1)
            for head, count in zip(torch.split(x, 1, 1), counts, strict=True)
        ],
        1,
    )


def can_plan(documents: Documents, batch: int) -> bool:
    """Returns whether attention can compute each document alone: a compiler cannot trace lengths
    that depend on data, and recorded probabilities are those of whole rows.
    """
    if not can_overwrite_gradients() or attention_record.probabilities is not None:
        return False
    return documents.find_spans(batch) is not None


@cache
def log_gathering() -> None:
    """Says, once, that a call gathers keys although they were to pass around a ring."""
    log.info("added biases, sinks and recorded probabilities gather keys, without a ring")


def chooses_heads(num_heads: int, mesh: ParallelMesh | None, exchange: ContextExchange) -> bool:
    """Returns whether context-parallel ranks exchange heads, and not keys and values.

    By default they do so wherever each rank gets equally many: the exchange balances causal
    attention, and what a rank keeps for the backward pass does not grow with the number of ranks.

    Raises:
        ValueError: The heads are to be exchanged, and the numbers do not allow it.
    """
    tensor = tp_size(mesh)
    context = context_size(mesh)
    fits = num_heads % (tensor * context) == 0
    if exchange == "heads" and not fits:
        raise ValueError(
            f"{num_heads} attention heads over {tensor} tensor-parallel ranks cannot be exchanged "
            f"between {context} context-parallel ranks; use context_exchange='keys'"
        )
    return fits and exchange in ("auto", "heads")


def check_heads(num_heads: int, tensor_parallel_size: int) -> None:
    """Raises ValueError if there are more ranks than attention heads."""
    if tensor_parallel_size > num_heads:
        raise ValueError(
            f"{num_heads} attention heads cannot be split {tensor_parallel_size} ways; use a "
            "model-parallel size from "
            f"1 to {num_heads}"
        )


def merge_heads(x: Tensor) -> Tensor:
    """[B, Np, S, D] -> [B, S, Hp]"""
    return x.transpose(1, 2).flatten(2)


def split_fused_heads(x: Tensor, heads: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
    """[B, S, sum(heads) * D] -> for each block of n heads [B, n, S, D]"""
    if writes_gradients_in_place(x):
        return _SplitFusedHeads.apply(x, heads, head_size)
    return _split_blocks(x, heads, head_size)


def _split_blocks(x: Tensor, heads: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
    by_head = x.view(*x.shape[:-1], -1, head_size)  # [B, S, sum(heads), D]
    return tuple([block.transpose(1, 2) for block in by_head.split_with_sizes(heads, dim=2)])


class _SplitFusedHeads(Function):
    """Implements `split_fused_heads`.

    The backward pass writes each block's gradient into its place. A concatenation, which is
    autograd's way and one launch on an accelerator, would on a CPU first copy each gradient to
    merge its heads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        ctx.heads = heads
        ctx.head_size = head_size
        return _split_blocks(x, heads, head_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        whole = empty_pooled(grads[0], *ctx.shape)
        for block, grad in zip(_split_blocks(whole, ctx.heads, ctx.head_size), grads, strict=True):
            block.copy_(grad)
        return whole, None, None


def fold_beams(queries: Tensor, rows: int) -> tuple[Tensor, int]:
    """Folds n sequences for each of B = `rows` sources into one: [B·n, Np, S, D] -> ([B, Np, n·S,
    D], n).
    """
    copies = queries.shape[0] // rows
    if copies == 1:
        return queries, 1
    return torch.unflatten(queries, 0, (rows, copies)).transpose(1, 2).flatten(2, 3), copies


def unfold_beams(attended: Tensor, copies: int) -> Tensor:
    """Reverses `fold_beams`: [B, Np, n·S, D] -> [B·n, Np, S, D]."""
    if copies == 1:
        return attended
    return torch.unflatten(attended, 2, (copies, -1)).transpose(1, 2).flatten(0, 1)
