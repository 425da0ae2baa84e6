"""Implements the parts of a transformer's blocks, split over the tensor-parallel ranks, and the loop over blocks.

Attention splits its heads, the MLP its inner width. An attention mask is bool and broadcastable to [B, N, Sq, Sk]; True
means that the query attends to the key, and None stands for True everywhere. With `causal=True` in attention's call, a
query does not attend to later keys, unless the mask has a row for each query: such a mask is complete. In place of a
mask, int64 [B] with `causal=True` is the length of each sample's prefix, whose keys every query attends to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, cast

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
    column_parallel,
    divide,
    scaled_masked_softmax,
    tp_rank,
    tp_size,
)
from ...mpu.division import first_unit
from ...mpu.parameter import split_parameter
from ...ops import (
    attention,
    bias_gelu,
    few_queries_attention,
    geglu,
    in_inference_mode,
    linear,
    matmul,
    relu,
    swiglu,
)
from ...ops.autograd import Function, once_differentiable
from ...ops.library import OPS, can_bypass_dispatcher, empty_pooled, needs_gradient
from ...ops.softmax import lay_out_diagonals
from .cache import LayerKVCache
from .padding import Tokens
from .parallel_config import LayerArguments, ParallelConfig
from .rotary import Rotary, rotate

MAX_EAGER_SCORES = 512 * 512  # scores per head, for `eager_beats_sdpa`
MIN_TILED_SCORES = 64 * 64  # scores per head, for `suits_blocks`
MIN_BLOCKED_SCORES = 2048 * 2048  # the same without a kernel

gelu_tanh = partial(F.gelu, approximate="tanh")

# The names are transformers'. "gelu_new", "gelu_fast" and "gelu_pytorch_tanh" are the tanh approximation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "silu": F.silu,
    "swish": F.silu,
}
WITH_BIAS: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.gelu: bias_gelu,
    gelu_tanh: partial(bias_gelu, approximate="tanh"),
}
GATES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.gelu: geglu,
    gelu_tanh: partial(geglu, approximate="tanh"),
    F.silu: swiglu,
}


def key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Returns the mask of bidirectional attention and cross-attention, which excludes padding.

    Args:
        attention_mask: None; or [B, Sk], nonzero for tokens and 0 for padding, as in transformers; or a complete mask
            [B or 1, N or 1, Sq, Sk], nonzero where a query attends to a key.

    Raises:
        ValueError: The shape is another one, or a 4-D mask has floats, which may be meant to be added.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        return attention_mask.bool()[:, None, None, :]
    if attention_mask.dim() == 4 and not attention_mask.is_floating_point():
        return attention_mask.bool()
    raise ValueError(
        "attention_mask must be [B, S], 0 for padding, or a bool or integer [B, N, Sq, Sk], 0 where not attended; "
        f"got {attention_mask.dtype} {tuple(attention_mask.shape)}"
    )


def split_mask(mask: Tensor | Tokens | None) -> tuple[Tokens | None, Tensor | None]:
    """Returns the tokens, if they stand for the mask, and the mask."""
    return (mask, mask.mask) if isinstance(mask, Tokens) else (None, mask)


def causal_mask(attention_mask: Tensor | None, sequence_length: int) -> Tensor | None:
    """Returns the mask for S queries and `causal=True`: None, of the keys [B, 1, 1, Sk], or a complete one.

    See `key_mask` for `attention_mask`.
    """
    keys = key_mask(attention_mask)
    if keys is None or attention_mask is None or attention_mask.dim() == 2:
        return keys
    return keys.expand(-1, -1, sequence_length, -1)


def window_mask(
    attention_mask: Tensor | None,
    sequence_length: int,
    cached: int,
    window: int,
    *,
    causal: bool,
    device: torch.device,
) -> Tensor | None:
    """Returns the mask of attention within a window, over `cached` earlier positions and the S new ones.

    As in transformers, the window counts padding too, and a complete mask is returned unchanged (see `key_mask`). The
    result is None if there is no padding and the window excludes nothing.

    Args:
        attention_mask: As in `causal_mask`.
        window: If causal, each position attends to itself and to the `window - 1` positions before it (the
            `sliding_window` of Mistral and Qwen); else to the positions at most `window` away on either side.
        device: Where the mask is made if `attention_mask` is None.
    """
    keys, total = key_mask(attention_mask), cached + sequence_length
    if attention_mask is not None and attention_mask.dim() == 4:
        return keys
    reach = window if causal else window + 1  # the positions on one side, this one included
    if total <= reach:
        return keys
    places = torch.arange(total, device=device if keys is None else keys.device)
    distance = places[cached:, None] - places  # [S, cached + S]
    inside = (distance >= 0) & (distance < reach) if causal else distance.abs() < reach
    return inside if keys is None else inside & keys


def lower_triangular_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns bool [Sq, Sk]: each query attends to its own and earlier positions; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class RelativeBias(nn.Module):
    """A relative position bias on attention scores, of one layer or shared by a stack (Raffel et al., 2020,
    arXiv:1910.10683). Weight [buckets, N], split by heads: a learned number for each head and bucket of distances.

    Args:
        bidirectional: Keys after the query have separate buckets (half of all buckets); otherwise they share bucket 0.
    """

    def __init__(
        self,
        buckets: int,
        num_heads: int,
        max_distance: int,
        *,
        bidirectional: bool,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, tp_size(mesh))
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.shard = Shard((buckets, num_heads), 1)
        self.weight = split_parameter(self.shard, mesh)  # [buckets, Np]

    def forward(self, queries: int, keys: int, buckets: Tensor | None = None) -> Tensor:
        """Returns the bias [1, Np, Sq, Sk], or of each distance, [Np, Sq + Sk - 1], where attention takes it so (see
        `suits_blocks`). The last query is at the last key's position.

        `buckets` is the result of `distance_buckets`, which is the same for all layers of a stack.
        """
        if buckets is None:
            buckets = distance_buckets(
                queries,
                keys,
                self.weight.device,
                self.buckets,
                self.max_distance,
                self.bidirectional,
            )
        # Many distances share a bucket, so their gradients are summed in fp32.
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        by_distance = F.embedding(buckets, wide).to(self.weight.dtype).t()  # [Np, Sq + Sk - 1]
        if suits_blocks(queries, keys, wide.device.type, self.weight.itemsize):
            return by_distance
        return lay_out_diagonals(by_distance, queries, keys)[None]

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, bidirectional={self.bidirectional}"


def distance_buckets(
    queries: int,
    keys: int,
    device: torch.device,
    buckets: int,
    max_distance: int,
    bidirectional: bool,
) -> Tensor:
    """Returns the bucket of each distance key - query from 1 - Sk to Sq - 1, int64 [Sq + Sk - 1].

    The bias depends only on the distance, so `RelativeBias` looks each up once and copies it along its diagonal.
    """
    return relative_buckets(
        torch.arange(1 - keys, queries, device=device), buckets, max_distance, bidirectional
    )


def relative_buckets(
    distances: Tensor, buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Returns the bucket of each distance key - query.

    Short distances have one bucket each, longer ones share buckets of logarithmic width, and all distances from
    `max_distance` share the last bucket.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = (distances > 0).long() * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # Distances below `exact` do not use this value; the clamp keeps their log finite. The order of operations is that
    # of transformers, so that rounding gives the same bucket edges.
    steps = (
        torch.log(distances.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (buckets - exact)
    )
    logarithmic = (exact + steps.long()).clamp(max=buckets - 1)
    return first + torch.where(distances < exact, distances, logarithmic)


class Attention(nn.Module):
    """Base of self- and cross-attention: input projections, attention core and output projection.

    A subclass lists its input projections in `projections`: name -> the blocks "q", "k" and "v" stacked in the weight.

    Args:
        num_key_value_heads: For grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245); num_heads by default.
        head_size: hidden_size / num_heads by default.
        qkv_bias, output_bias: Whether the input projections, and the output projection, have biases.

    Raises:
        ValueError: The tensor-parallel size is larger than the number of heads; a head is never split.
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
        dropout: float = 0.0,
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
            dropout=dropout,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        heads = {"q": num_heads, "k": num_key_value_heads, "v": num_key_value_heads}
        self.heads: dict[str, tuple[int, ...]] = {}  # projection -> this rank's heads in each block
        for name, blocks in self.projections.items():
            widths = tuple(heads[block] * self.head_size for block in blocks)
            groups = widths if len(widths) > 1 else None
            projection = ColumnParallelLinear(
                hidden_size, sum(widths), bias=qkv_bias, groups=groups, **shared
            )
            self.add_module(name, projection)
            computed = projection.shard.needed_ranges(tp_rank(mesh), tp_size(mesh))
            self.heads[name] = tuple((stop - start) // self.head_size for start, stop in computed)
        self.output = RowParallelLinear(
            num_heads * self.head_size, hidden_size, bias=output_bias, **shared
        )


class SelfAttention(Attention):
    """Attention of a sequence to itself, with one fused projection [Q|K|V].

    Args:
        qk_norm_eps: The epsilon of an RMSNorm over the features of each query head, and of each key head, before they
            are rotated; None for no such norms. The other arguments are those of `Attention`.
    """

    projections: ClassVar = {"qkv": "qkv"}
    qkv: ColumnParallelLinear

    def __init__(self, *args: Any, qk_norm_eps: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Each rank has other heads, so the ranks' gradients of a norm's weight are summed.
        shared: LayerArguments = {"mesh": kwargs.get("mesh"), "sequence_parallel": True}
        self.q_norm = (
            None if qk_norm_eps is None else RMSNorm(self.head_size, qk_norm_eps, **shared)
        )
        self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(self.head_size, qk_norm_eps, **shared)
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Tokens | None = None,
        position_bias: Tensor | None = None,
        *,
        causal: bool = False,
        memory: Tensor | None = None,
        cache: LayerKVCache | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Returns [B, S, H]. With memory or a cache of M earlier positions there are M + S keys, else S.

        Args:
            x: [B, S, H].
            mask: bool, broadcastable to [B, Np, S, S], True where a query attends to a key; None for all; or prefixes;
                or `Tokens`, whose rows [T, 1, H] x and the result then are.
            position_bias: Added to the scaled scores, and perhaps trained: from `RelativeBias`, or [1 or B, Np, S, S].
            causal: Each position attends to itself and to earlier positions only, unless the mask is complete.
            memory: [B, M, H], the hidden states of the positions before x, which x attends to as well. Not supported
                under sequence parallelism, where x is a part of the sequence.
            cache: The keys and values of M earlier positions; those of x are appended to it.
            rotary: The rotation to the positions of x, from `rotary_embedding`; not supported with memory.
        """
        tokens, mask = split_mask(mask)
        qkv = self.qkv(x if memory is None else torch.cat([memory, x], dim=1))
        qkv = qkv if tokens is None else tokens.pad(qkv)
        q, k, v = split_fused_heads(qkv, self.heads["qkv"], self.head_size)  # [B, Np or Kp, S, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if memory is not None:
            q = q[:, :, memory.shape[1] :]
        if cache is not None:
            k, v = cache.extend(k, v)
        merged = merge_heads(self.core(q, k, v, mask, position_bias, causal))
        return self.output(merged if tokens is None else tokens.unpad(merged))


class CrossAttention(Attention):
    """Attention of one sequence to another, with a query projection and a fused projection [K|V]."""

    projections: ClassVar = {"query": "q", "key_value": "kv"}
    query: ColumnParallelLinear
    key_value: ColumnParallelLinear

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | Tokens | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            source: [B, T, H], the sequence that x attends to.
            mask: bool, broadcastable to [B, Np, S, T]; or `Tokens`, whose rows the source then is.
            cache: The first call stores the source's keys and values in it, and later calls use them. With a cache, x
                may have n consecutive rows for each row of the source, and mask must be the same for all queries.
        """
        tokens, mask = split_mask(mask)
        q = torch.unflatten(self.query(x), -1, (-1, self.head_size)).transpose(
            1, 2
        )  # [B, Np, S, D]
        if cache is not None and cache.length:
            k, v = cache.filled()
        else:
            key_value = self.key_value(source)
            key_value = key_value if tokens is None else tokens.pad(key_value)
            k, v = split_fused_heads(key_value, self.heads["key_value"], self.head_size)
            if cache is not None:
                k, v = cache.extend(k, v)
        q, copies = fold_beams(q, k.shape[0])
        return self.output(merge_heads(unfold_beams(self.core(q, k, v, mask, None, False), copies)))


class CoreAttention(nn.Module):
    """Computes softmax(scale · q·kᵀ + position_bias)·v for this rank's heads, over the keys that the mask allows.

    A query without any allowed key gets zeros, as in `scaled_dot_product_attention`. Selective recomputation keeps only
    q, k and v for the backward pass, and so does attention in blocks.
    """

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        *,
        scale: float,
        dropout: float,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = Dropout(dropout, count=num_heads, mesh=mesh)
        first, last = (first_unit(num_heads, tp_rank(mesh) + end, tp_size(mesh)) for end in (0, 1))
        served = Counter(head * num_key_value_heads // num_heads for head in range(first, last))
        # The query heads of each of this rank's key-value heads; empty if they are equally many.
        self.served = tuple(served.values()) if len(set(served.values())) > 1 else ()
        self.recompute = parallel_config.recompute == "selective"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        position_bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Returns [B, Np, Sq, D]. The other arguments are as in `SelfAttention`.

        Args:
            q: [B, Np, Sq, D].
            k, v: [B, Kp, Sk, D]; each key-value head serves consecutive query heads.
        """
        if self.served:
            k, v = repeat_unequally(k, self.served), repeat_unequally(v, self.served)
        visible = Visible.of(mask, causal, q.shape[2])
        if self.by_blocks(q, k, position_bias):
            return self.attend_in_blocks(q, k, v, visible, position_bias)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.attend, q, k, v, visible, position_bias)
        return self.attend(q, k, v, visible, position_bias)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, position_bias: Tensor | None
    ) -> Tensor:
        if (
            position_bias is not None
            and visible.mask is None
            and not visible.causal
            and in_inference_mode()
        ):
            visible, position_bias = (
                Visible(position_bias),
                None,
            )  # without gradients, it can be a mask to add
        if position_bias is None and not self.dropout.drops and not eager_beats_sdpa(q, k):
            few = in_inference_mode() and few_queries_attention(q, k, v, *visible, scale=self.scale)
            if isinstance(few, Tensor):
                return few
            causal = (
                visible.mask is None
                and visible.prefix is None
                and visible.causal
                and q.shape[2] == k.shape[2]
            )
            grouped = q.shape[1] != k.shape[1]
            mask = None if causal else visible.whole_mask(q.shape[2], k.shape[2], q.device)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, is_causal=causal, enable_gqa=grouped
            )
        # Compute the probabilities explicitly, for one of three reasons: the gradient of a trained bias, a dropout mask
        # that does not depend on the layout, or speed.
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        scores = matmul(q, k.mT)  # [B, Np, Sq, Sk]
        rules: dict[str, Any] = {
            "causal": visible.causal,
            "prefix": visible.prefix,
            "dropout": self.dropout,
        }
        return matmul(
            scaled_masked_softmax(scores, visible.mask, position_bias, scale=self.scale, **rules), v
        )

    def by_blocks(self, q: Tensor, k: Tensor, position_bias: Tensor | None) -> bool:
        """Whether attention is computed in tiles or blocks.

        Without gradients too, so that a pass that is repeated with them rounds alike. On an accelerator PyTorch's own
        fused attention serves where it can.
        """
        if position_bias is not None:
            return position_bias.dim() == 2  # as `RelativeBias` decided
        needed = self.dropout.drops or (q.is_cpu and not in_inference_mode())
        return needed and suits_blocks(q.shape[2], k.shape[2], q.device.type, q.dtype.itemsize)

    def attend_in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, by_distance: Tensor | None
    ) -> Tensor:
        mask = visible.mask
        mask = mask if mask is None or mask.dim() == 4 else mask[None, None]
        rules: dict[str, Any] = {
            "causal": visible.causal,
            "prefix": visible.prefix,
            **self.dropout.of_heads(q),
        }
        return attention(q, k, v, scale=self.scale, mask=mask, relative_bias=by_distance, **rules)


class Visible(NamedTuple):
    """The rules for which keys a query attends to. The fields are as in `ops.attention`."""

    mask: Tensor | None = None
    causal: bool = False
    prefix: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None, causal: bool, queries: int) -> Visible:
        """Returns the rules of a mask or prefixes; see the top of the file."""
        causal = causal and queries > 1  # the last query attends to every key
        if mask is not None and mask.dim() == 1:
            return cls(None, causal, mask if causal else None)
        return cls(mask, causal and (mask is None or mask.shape[-2] == 1))

    def whole_mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Returns all rules as one mask, broadcastable to [B, N, Sq, Sk]; None stands for True everywhere."""
        if not self.causal:
            return self.mask
        visible = lower_triangular_mask(queries, keys, device)
        if self.prefix is not None:
            visible = visible | (
                torch.arange(keys, device=device) < self.prefix.reshape(-1, 1, 1, 1)
            )
        return visible if self.mask is None else visible & self.mask


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


def suits_blocks(queries: int, keys: int, device: str, itemsize: int) -> bool:
    """Whether attention with dropout or a trained bias computes a tile or block of the scores at a time.

    Kernels are faster than products and a softmax of whole scores, but for the shortest sequences on a CPU. Without
    them, the scores of shorter sequences are written to memory: the backward pass need not compute them again.

    Args:
        device: PyTorch's type of device.
        itemsize: Bytes of an element of q.
    """
    if queries == 1 or device != "cpu":
        return queries > 1
    return queries * keys >= (
        MIN_TILED_SCORES if has_attention_kernel(device, itemsize) else MIN_BLOCKED_SCORES
    )


@cast(Any, torch.compiler).assume_constant_result
def has_attention_kernel(device: str, itemsize: int) -> bool:
    """Whether attention has a kernel: not in fp64, and otherwise always on an accelerator, which may be elsewhere."""
    return itemsize < 8 and (
        device != "cpu" or OPS["attention"].choose_variant(device) != "reference"
    )


def eager_beats_sdpa(q: Tensor, k: Tensor) -> bool:
    """Whether two matrix products and a softmax are faster than `scaled_dot_product_attention`, forward and backward.

    They are for 16-bit types on a CPU: 12 ms against 26 for 4 × 12 heads of 64 at 256 positions, 53 against 87 at 512.
    Longer sequences would need too much memory.
    """
    short = q.shape[2] * k.shape[2] <= MAX_EAGER_SCORES
    return (
        q.is_cpu and q.dtype.itemsize == 2 and short and torch.is_grad_enabled() and q.requires_grad
    )


def check_heads(num_heads: int, tensor_parallel_size: int) -> None:
    """Raises ValueError if there are more ranks than attention heads."""
    if tensor_parallel_size > num_heads:
        raise ValueError(
            f"{num_heads} attention heads cannot be split {tensor_parallel_size} ways; use a model-parallel size from "
            f"1 to {num_heads}"
        )


def merge_heads(x: Tensor) -> Tensor:
    """[B, Np, S, D] -> [B, S, Hp]"""
    return x.transpose(1, 2).flatten(2)


def split_fused_heads(x: Tensor, heads: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
    """[B, S, sum(heads) * D] -> for each block of n heads [B, n, S, D]"""
    if x.is_cpu and needs_gradient(x) and can_bypass_dispatcher(x):
        return _SplitFusedHeads.apply(x, heads, head_size)
    return _split_blocks(x, heads, head_size)


def _split_blocks(x: Tensor, heads: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
    blocks = torch.unflatten(x, -1, (-1, head_size)).split_with_sizes(heads, dim=2)
    return tuple(block.transpose(1, 2) for block in blocks)


class _SplitFusedHeads(Function):
    """Implements `split_fused_heads`.

    The backward pass writes each block's gradient into its place. A concatenation, which is autograd's way and one
    launch on an accelerator, would on a CPU first copy each gradient to merge its heads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.heads, ctx.head_size = x.shape, heads, head_size
        return _split_blocks(x, heads, head_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        whole = empty_pooled(grads[0], *ctx.shape)
        for block, grad in zip(_split_blocks(whole, ctx.heads, ctx.head_size), grads, strict=True):
            block.copy_(grad)
        return whole, None, None


def fold_beams(queries: Tensor, rows: int) -> tuple[Tensor, int]:
    """Folds n sequences for each of B = `rows` sources into one: [B·n, Np, S, D] -> ([B, Np, n·S, D], n)."""
    copies = queries.shape[0] // rows
    if copies == 1:
        return queries, 1
    return torch.unflatten(queries, 0, (rows, copies)).transpose(1, 2).flatten(2, 3), copies


def unfold_beams(attended: Tensor, copies: int) -> Tensor:
    """Reverses `fold_beams`: [B, Np, n·S, D] -> [B·n, Np, S, D]."""
    if copies == 1:
        return attended
    return torch.unflatten(attended, 2, (copies, -1)).transpose(1, 2).flatten(0, 1)


def add_and_norm(
    norm: nn.Module, dropout: Dropout, branch: Tensor, residual: Tensor, *, clamp_fp16: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (norm(h), h) with h = residual + dropout(branch). If nothing is dropped, the norm's operator adds."""
    clamps = clamp_fp16 and residual.dtype == torch.float16
    if not dropout.drops and not clamps:
        return norm(branch, residual, return_residual=True)
    h = dropout(branch, residual)
    return norm(clamp_fp16_overflow(h) if clamps else h, return_residual=True)


def clamp_fp16_overflow(x: Tensor) -> Tensor:
    """Clamps an fp16 residual stream, as in transformers, because T5's overflows in fp16."""
    if x.dtype != torch.float16:
        return x
    most = torch.finfo(x.dtype).max - 1000
    return x.clamp(-most, most)


class MLP(nn.Module):
    """down(dropout(activation(up(x))))."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "bias": bias,
            "sequence_parallel": parallel_config.sequence_parallel,
            "mesh": mesh,
        }
        self.activation = find_activation(activation)
        self.up = ColumnParallelLinear(hidden_size, inner_size, **shared)
        self.dropout = Dropout(dropout, split_dim=-1, count=inner_size, mesh=mesh)
        self.down = RowParallelLinear(inner_size, hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        fused = None if self.up.bias is None else WITH_BIAS.get(self.activation)
        if (
            fused is None or self.up.bias is None or hasattr(self.up, "adapter")
        ):  # see `lora.Adapter`
            return self.down(self.dropout(self.activation(self.up(x))))
        y = column_parallel(
            x, self.up.weight, None, sequence_parallel=self.up.sequence_parallel, mesh=self.up.mesh
        )
        return self.down(self.dropout(fused(y, self.up.bias.to(y.dtype))))  # y: [B, S, Fp]


class GatedMLP(nn.Module):
    """down(dropout(activation(gate(x)) · up(x))) (Shazeer 2020, arXiv:2002.05202).

    Args:
        fused: Whether gate and up are one parameter, [gate|up], as the files of some families store them. Otherwise any
            number of ranks can share the inner width.
        bias: Whether the projections have biases; only of a fused one.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        fused: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "sequence_parallel": parallel_config.sequence_parallel,
            "mesh": mesh,
        }
        self.activation = find_activation(activation)
        self.dropout = Dropout(
            dropout, split_dim=-1, count=inner_size if fused else None, mesh=mesh
        )
        if fused:
            groups = (inner_size, inner_size)
            self.gate_up = ColumnParallelLinear(
                hidden_size, 2 * inner_size, bias=bias, groups=groups, **shared
            )
            self.down = RowParallelLinear(inner_size, hidden_size, bias=bias, **shared)
        else:
            self.gate_up = GateUpLinear(hidden_size, inner_size, **shared)
            self.down = DownLinear(inner_size, hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]"""
        projected = self.gate_up(x)
        gate, up = (
            split_in_halves(projected) if isinstance(projected, Tensor) else projected
        )  # [B, S, Fp] each
        fused = GATES.get(self.activation)
        product = self.activation(gate) * up if fused is None else fused(gate, up)
        return self.down(self.dropout(product))


def split_in_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2F] -> two tensors [..., F]"""
    if x.is_cpu and needs_gradient(x) and can_bypass_dispatcher(x):
        return _Halves.apply(x)
    first, second = x.chunk(2, dim=-1)
    return first, second


class _Halves(Function):
    """Implements `split_in_halves` on a CPU. The backward pass writes both gradients into their places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        return x.chunk(2, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        whole = empty_pooled(grads[0], *ctx.shape)
        for half, grad in zip(whole.chunk(2, dim=-1), grads, strict=True):
            half.copy_(grad)
        return whole


class GateUpLinear(nn.Module):
    """Computes x·gateᵀ and x·upᵀ, without biases, with the inner features split over the ranks and one exchange.

    If the number of ranks does not divide the inner width (1024 in mT5-small over 3), the last rank's rows end with
    zeros. They stay zero: the gated product of zeros is zero, so neither they nor the columns of `DownLinear` that
    multiply them get a gradient.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__()
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        self.shard = Shard((inner_size, hidden_size), 0, pad_multiple=1)
        self.gate = split_parameter(self.shard, mesh)  # [Fp, H]
        self.up = split_parameter(self.shard, mesh)  # [Fp, H]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to two tensors [B, S, Fp]."""
        if tp_size(self.mesh) == 1 or (in_inference_mode() and not self.sequence_parallel):
            return linear(x, self.gate), linear(x, self.up)  # no exchange is needed
        weight = torch.cat(
            [self.gate, self.up]
        )  # cheap compared with the products, and one exchange instead of two
        both = column_parallel(
            x, weight, None, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )
        gate, up = both.chunk(2, dim=-1)
        return gate, up

    def extra_repr(self) -> str:
        return f"2 x {self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class DownLinear(RowParallelLinear):
    """The output projection of `GatedMLP`, without a bias; its input is split like the output of `GateUpLinear`."""

    def __init__(
        self,
        inner_size: int,
        hidden_size: int,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ) -> None:
        size = tp_size(mesh)
        padded = -(-inner_size // size) * size
        super().__init__(
            padded, hidden_size, bias=False, sequence_parallel=sequence_parallel, mesh=mesh
        )
        self.in_features = inner_size
        self.shard = Shard((hidden_size, inner_size), 1, pad_multiple=1)
        self.weight = split_parameter(self.shard, mesh)  # [H, Fp]


def find_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation with this name in transformers. Raises ValueError for an unknown name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


Context = Callable[[int], tuple[Any, ...]]
"""Returns the arguments of block i after its input."""


def run_blocks(blocks: nn.ModuleList, x: Tensor, context: Context, recompute: bool) -> list[Tensor]:
    """Returns the blocks' input and each block's output.

    Args:
        blocks: Of a pipeline stage, only its own run; each maps (its input, *context(its number)) to its output.
        x: [B, S, H], or [B, S/tp, H] under sequence parallelism.
        recompute: Keep only each block's input for the backward pass, and compute the block again there.

    Raises:
        StageEnd: The next block is in the next pipeline stage.
    """
    part: PipelinePart | None = getattr(blocks, "part", None)
    numbers = range(len(blocks))
    if part is not None:
        numbers, x = part.own, part.enter(x)
    states = [x]
    for i in numbers:
        x = checkpoint(blocks[i], x, *context(i)) if recompute else blocks[i](x, *context(i))
        states.append(x)
    if part is not None and numbers.stop < len(blocks):
        raise StageEnd(x)
    return states


class StageEnd(Exception):
    """Leaves the forward pass of a model whose next block is in the next pipeline stage."""

    def __init__(self, hidden: Tensor | None) -> None:
        super().__init__("the next block is in the next pipeline stage")
        self.hidden = hidden


class PipelinePart(Protocol):
    """The blocks of a stack that are in this pipeline stage; `part` of the list of blocks."""

    own: range

    def enter(self, x: Any) -> Tensor:
        """Returns the input of the first own block: `x` if that is the stack's first, else what was received."""
        ...
