"""Computes attention of samples that lie one after another, without padding between them.

The queries of sample b are the rows [query_starts[b], query_starts[b + 1]) of q, and its keys those
of k that `key_starts` names (the `cu_seqlens` of flash-attention). Everything else is as in
attention.py: a relative bias by distance, the causal rule, and dropout masks of the sample, head,
query and key, which are those of the same samples with padding on their right.

Shapes: T rows of queries, U rows of keys, B samples, N query heads, K key-value heads, D the size of
a head. Sq and Sk are at least the queries and keys of the longest sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import backward_reference as differentiate_padded
from .attention import find_obstacle, save_for_attention_backward
from .attention import reference as attend_padded
from .dispatcher import flop_counters
from .matmul import autocast_arguments
from .registration import Op, compute_dtype, empty_placeholder


def suits_varlen(q: Tensor) -> bool:
    """Returns whether a kernel computes samples without padding on the device and in the dtype of q.

    The reference takes one sample after another. Callers with padded samples leave it to `attention`.
    """
    return q.dtype != torch.float64 and forward_op.choose_variant(q.device.type) == "triton"


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    max_queries: int,
    max_keys: int,
    scale: float,
    relative_bias: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    keys: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """Computes attention within each sample; returns the output [T, N, D] in the dtype of q.

    Args:
        q: [T, N, D], fp32, bf16, fp16 or fp64.
        k, v: [U, K, D] in the dtype of q; each of the K heads serves N / K consecutive query heads.
        query_starts: int32 or int64 [B + 1], ascending from 0 to T, on the device of q. Their values
            are not checked, because the host would have to wait for them.
        key_starts: The same for keys, up to U.
        max_queries, max_keys: Sq and Sk. Rows of a sample beyond them are not computed.
        relative_bias: [N, Sq + Sk - 1], of the distances key - query from 1 - Sq on. It gets a
            gradient.
        causal: Query i of a sample attends to its keys j <= i + the sample's keys - its queries.
        dropout, keys, first_head: As in `attention`; keys are int64 [B].

    Raises:
        ValueError: Shapes or dtypes do not match, or dropout lacks keys.
    """
    _check(q, k, v, query_starts, key_starts, relative_bias, max_queries, max_keys)
    batch = len(query_starts) - 1
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {dropout}")
    if dropout and (keys is None or keys.dtype != torch.int64 or tuple(keys.shape) != (batch,)):
        raise ValueError(
            f"dropout needs int64 `keys`, one per sample, shape ({batch},) (see dropout_keys)"
        )
    flops_before = [(counter, counter.get_total_flops()) for counter in flop_counters()]
    out = forward_op(
        *autocast_arguments(q, k, v),
        query_starts,
        key_starts,
        relative_bias,
        keys if dropout else None,
        max_queries,
        max_keys,
        float(scale),
        causal,
        float(dropout),
        first_head,
    )[0]
    for counter, before in flops_before:
        # A counter sees the reference's products, but not a kernel's. The host does not know the
        # lengths, so it counts the keys of the longest sample for all.
        if counter.get_total_flops() == before:
            flops = 4 * q.numel() * max_keys
            counter.flop_counts["Global"][torch.ops.shardzoo.varlen_attention] += flops
    return out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    relative_bias: Tensor | None,
    max_queries: int,
    max_keys: int,
) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[2] != q.shape[2]:
        matches = False
    else:
        matches = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not matches:
        raise ValueError(
            "varlen_attention needs q [T, N, D] and k, v [U, K, D] with N a multiple of K; got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    for name, starts in (("query_starts", query_starts), ("key_starts", key_starts)):
        is_integer = starts.dtype in (torch.int32, torch.int64)
        if not is_integer or starts.dim() != 1 or starts.shape != query_starts.shape:
            raise ValueError(
                f"{name} needs the first row of each sample and the end of the last, int32 or int64 "
                f"[B + 1], as many as query_starts; got {starts.dtype} {tuple(starts.shape)}"
            )
    distances = (q.shape[1], max_queries + max_keys - 1)
    if relative_bias is not None and tuple(relative_bias.shape) != distances:
        raise ValueError(
            "a relative bias is [N, max_queries + max_keys - 1] = "
            f"{distances}, got {tuple(relative_bias.shape)}"
        )


# The definition, one sample after another.


@torch.no_grad()
def reference(q, k, v, query_starts, key_starts, bias, keys, max_queries, max_keys, *settings):
    """Computes the output [T, N, D] and lse, fp32 (fp64 for fp64) [T · N].

    The numbers of lse of a sample are those of its first head, then those of the next.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    every_lse: list[Tensor] = []
    for sample in _split_samples(query_starts, key_starts):
        own_q, own_k, own_v = _take_sample(sample, q, k, v)
        rules = _make_rules(sample, bias, keys, max_queries, *settings)
        attended, lse = attend_padded(own_q, own_k, own_v, *rules)
        out[sample[1]] = attended[0].transpose(0, 1)
        every_lse.append(lse.flatten())
    return out, torch.cat(every_lse)


@torch.no_grad()
def backward_reference(
    grad, out, lse, q, k, v, query_starts, key_starts, bias, keys, max_queries, max_keys, *settings
):
    """Returns the gradients of q, k, v and the bias; that of the bias is summed in fp32 or fp64."""
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    wide = compute_dtype(q)
    grad_bias = empty_placeholder(q) if bias is None else torch.zeros_like(bias, dtype=wide)
    for sample in _split_samples(query_starts, key_starts):
        _, queries, own = sample
        own_grad, own_out, own_q = (x[queries].transpose(0, 1)[None] for x in (grad, out, q))
        own_k, own_v = (x[own].transpose(0, 1)[None] for x in (k, v))
        # The bias is widened, so that its gradients of all samples are summed before they are
        # rounded. Where it is added to the scores, it is rounded to their dtype.
        wide_bias = None if bias is None else bias.to(wide)
        rules = _make_rules(sample, wide_bias, keys, max_queries, *settings)
        own_lse = lse[:0]  # the reference does not read it
        grads = differentiate_padded(own_grad, own_out, own_lse, own_q, own_k, own_v, *rules)
        grad_q[queries] = grads[0][0].transpose(0, 1)
        grad_k[own] = grads[1][0].transpose(0, 1)
        grad_v[own] = grads[2][0].transpose(0, 1)
        if bias is not None:
            first = max_queries - own_q.shape[2]
            grad_bias[:, first : first + grads[3].shape[1]] += grads[3]
    if bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_q, grad_k, grad_v, grad_bias


def _split_samples(query_starts: Tensor, key_starts: Tensor) -> list[tuple[int, slice, slice]]:
    """Returns the number and the rows of the queries and keys of each sample with queries."""
    queries = query_starts.tolist()
    keys = key_starts.tolist()
    samples: list[tuple[int, slice, slice]] = []
    for b in range(len(queries) - 1):
        if queries[b + 1] > queries[b]:
            samples.append((b, slice(queries[b], queries[b + 1]), slice(keys[b], keys[b + 1])))
    return samples


def _take_sample(sample: tuple[int, slice, slice], q: Tensor, k: Tensor, v: Tensor):
    """Returns q [1, N, Sq, D] and k, v [1, K, Sk, D] of a sample."""
    _, queries, keys = sample
    return (
        q[queries].transpose(0, 1)[None],
        k[keys].transpose(0, 1)[None],
        v[keys].transpose(0, 1)[None],
    )


def _make_rules(sample, bias, keys, max_queries, scale, causal, dropout, first_head):
    """Returns the rules of a sample, in the order of `attention.ScoreRules`."""
    b, queries, own = sample
    if bias is not None:
        own_queries = queries.stop - queries.start
        first = max_queries - own_queries
        bias = bias[:, first : first + own_queries + (own.stop - own.start) - 1]
    own_keys = None if keys is None else keys[b : b + 1]
    return (bias, None, None, None, own_keys, scale, causal, dropout, first_head, 0, 0.0)


# The gradient formula.


def _setup_context(ctx, inputs, output):
    # The first seven inputs are tensors: q, k, v, the starts, the bias and dropout's keys.
    save_for_attention_backward(ctx, inputs, output, tensors=7)


def _backward(ctx, grad, _):
    grad_q, grad_k, grad_v, grad_bias = backward_op(grad, *ctx.saved_tensors, *ctx.settings)
    if not ctx.needs_input_grad[5]:
        grad_bias = None
    return grad_q, grad_k, grad_v, None, None, grad_bias, *(None,) * 7


# The registration.

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor query_starts, Tensor key_starts, Tensor? relative_bias, "
    "Tensor? keys, SymInt max_queries, SymInt max_keys, float scale, bool causal, float dropout, "
    "SymInt first_head"
)


def _allocate(q, *_):
    lse = q.new_empty(q.shape[0] * q.shape[1], dtype=compute_dtype(q))
    return q.new_empty(q.shape), lse


def _allocate_backward(grad, out, lse, q, k, v, query_starts, key_starts, relative_bias, *_):
    if relative_bias is None:
        grad_bias = empty_placeholder(q)
    else:
        grad_bias = relative_bias.new_empty(relative_bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _prepare(q, k, v, query_starts, key_starts, relative_bias, keys, *settings):
    obstacle = find_obstacle(q[None], k[None], v[None], (relative_bias, None))
    return obstacle or (
        q,
        k,
        v,
        query_starts.contiguous(),
        key_starts.contiguous(),
        None if relative_bias is None else relative_bias.contiguous(),
        keys,
        *settings,
    )


def _prepare_backward(grad, out, lse, *arguments):
    prepared = _prepare(*arguments)
    return prepared if isinstance(prepared, str) else (grad, out, lse.contiguous(), *prepared)


def _launch_triton(*arguments):
    from .triton_kernels.attention import launch_varlen_forward

    launch_varlen_forward(*arguments)


def _launch_triton_backward(*arguments):
    from .triton_kernels.attention import launch_varlen_backward

    launch_varlen_backward(*arguments)


forward_op = Op(
    "varlen_attention",
    _ARGUMENTS,
    ("out", "lse"),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
    compiled=(),
    triton=_launch_triton,
)

backward_op = Op(
    "varlen_attention_backward",
    "Tensor grad, Tensor out, Tensor lse, " + _ARGUMENTS,
    ("grad_q", "grad_k", "grad_v", "grad_bias"),
    allocate=_allocate_backward,
    reference=backward_reference,
    prepare=_prepare_backward,
    compiled=(),
    triton=_launch_triton_backward,
)

forward_op.autograd(_setup_context, _backward)
