"""Computes attention whose probabilities never exist whole, forward and backward.

    z = scale * q·kᵀ + bias + mask,   out = dropout(softmax(z, keys))·v

The bias depends on the distance key - query alone: it is one number per head and diagonal of the scores, and so is its
gradient. Which probabilities dropout keeps is a function of the sample, head, query and key alone (ops/dropout.py), so
a tile computes its own part of the mask. The forward pass saves the log of each row's sum of exp, from which the
backward pass computes the probabilities again (Dao et al., 2022, arXiv:2205.14135). A query without any allowed key
gets zeros. Everything is computed in fp32 (fp64 for fp64 tensors) and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .dropout import kept_elements, row_keys
from .library import Op, compute_dtype, empty_placeholder, empty_pooled
from .softmax import sum_diagonals

ROWS_AT_ONCE = 128  # queries whose scores exist at a time in the PyTorch form


class Rules(NamedTuple):
    """What applies to the scores besides q and k. The fields are as in `attention`."""

    relative_bias: Tensor | None
    mask: Tensor | None
    prefix: Tensor | None
    key_lengths: Tensor | None
    keys: Tensor | None
    scale: float
    causal: bool
    dropout: float
    first_head: int
    first_row: int


class Block(NamedTuple):
    """The scores of the queries [start, end) with the first `columns` keys; no later key is visible to them."""

    start: int
    end: int
    columns: int
    queries: int  # of the whole tensor, as `total`
    total: int


def reference(q, k, v, *rules):
    """Computes the definition for all queries at a time. The arguments are as in the schema."""
    return _forward(q, k, v, Rules(*rules), [Block(0, q.shape[2], k.shape[2], q.shape[2], k.shape[2])])


def backward_reference(grad, q, k, v, out, log_sum, *rules):
    """Returns the gradients of q, k, v and of the relative bias, all queries at a time."""
    whole = Block(0, q.shape[2], k.shape[2], q.shape[2], k.shape[2])
    return _backward_blocks(grad, q, k, v, out, log_sum, Rules(*rules), [whole])


def _by_blocks(q, k, v, *rules):
    return _forward(q, k, v, Rules(*rules), _blocks(q, k, Rules(*rules)))


def _backward_by_blocks(grad, q, k, v, out, log_sum, *rules):
    return _backward_blocks(grad, q, k, v, out, log_sum, Rules(*rules), _blocks(q, k, Rules(*rules)))


def _blocks(q: Tensor, k: Tensor, rules: Rules) -> Iterator[Block]:
    """Yields blocks of queries, each with the keys up to the last that one of them may see; skips those without any."""
    queries, total = q.shape[2], k.shape[2]
    reach = _largest(rules.prefix, 0)
    longest = min(_largest(rules.key_lengths, total), total)
    for start in range(0, queries, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, queries)
        limit = max(end + total - queries, reach) if rules.causal else total
        if (columns := min(limit, longest)) > 0:
            yield Block(start, end, columns, queries, total)


def _largest(lengths: Tensor | None, default: int) -> int:
    return default if lengths is None or not lengths.numel() else int(lengths.max())


def _forward(q, k, v, rules, blocks):
    dtype = compute_dtype(q)
    out, log_sum = torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    for block in blocks:
        z = _scores(q, k, rules, block)
        top = z.logsumexp(-1)
        dropped = _dropped(_probabilities(z, top), rules, block)
        out[:, :, block.start : block.end] = _product(dropped, v[:, :, : block.columns].to(dtype))
        log_sum[:, :, block.start : block.end] = top
    return out.to(q.dtype), log_sum


def _backward_blocks(grad, q, k, v, out, log_sum, rules, blocks):
    dtype = compute_dtype(q)
    grad_q = torch.zeros_like(q, dtype=dtype)
    grad_k, grad_v = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    bias = rules.relative_bias
    grad_bias = empty_placeholder(q) if bias is None else torch.zeros_like(bias, dtype=dtype)
    for block in blocks:
        rows, columns = slice(block.start, block.end), slice(block.columns)
        p = _probabilities(_scores(q, k, rules, block), log_sum[:, :, rows])
        grad_out = grad[:, :, rows].to(dtype)
        grad_v[:, :, columns] += _sum_groups(_dropped(p, rules, block).mT @ grad_out, v.shape[1])
        grad_p = _dropped(_product(grad_out, v[:, :, columns].to(dtype).mT), rules, block)
        grad_z = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
        if bias is not None:
            first = block.queries - block.end
            sums = sum_diagonals(grad_z.sum(0))
            grad_bias[:, first : first + sums.shape[1]] += sums
        grad_z = grad_z * rules.scale
        grad_q[:, :, rows] = _product(grad_z, k[:, :, columns].to(dtype))
        grad_k[:, :, columns] += _sum_groups(grad_z.mT @ q[:, :, rows].to(dtype), k.shape[1])
    grad_bias = grad_bias if bias is None else grad_bias.to(bias.dtype)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Returns x·y for x [B, N, R, I] and y [B, K, I, C], each head of which serves N / K heads of x: [B, N, R, C]."""
    return (x.unflatten(1, (y.shape[1], -1)) @ y[:, :, None]).flatten(1, 2)


def _sum_groups(x: Tensor, heads: int) -> Tensor:
    """Sums [B, N, C, D] over the query heads of each key-value head: [B, heads, C, D]."""
    return x.unflatten(1, (heads, -1)).sum(2)


def _scores(q: Tensor, k: Tensor, rules: Rules, block: Block) -> Tensor:
    """Returns the scores of a block, [B, N, R, columns], with -inf where a query may not attend."""
    dtype, rows = compute_dtype(q), slice(block.start, block.end)
    z = _product(q[:, :, rows].to(dtype), k[:, :, : block.columns].to(dtype).mT) * rules.scale
    if rules.relative_bias is not None:
        # Row i begins at Sq - 1 - i, so the block's last row comes first.
        values = rules.relative_bias[:, block.queries - block.end :][:, : block.end - block.start + block.columns - 1]
        z = z + values.to(dtype).unfold(1, block.columns, 1).flip(1)
    mask = None if rules.mask is None else _cut(rules.mask, rows, block.columns)
    if mask is not None and mask.dtype != torch.bool:
        z = z + mask.to(dtype)
    visible = _visible(rules, block, z.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = mask if visible is None else mask & visible
    return z if visible is None else z.masked_fill(~visible, float("-inf"))


def _cut(mask: Tensor, rows: slice, columns: int) -> Tensor:
    mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    return mask if mask.shape[3] == 1 else mask[..., :columns]


def _visible(rules: Rules, block: Block, device: torch.device) -> Tensor | None:
    key = torch.arange(block.columns, device=device)
    visible = None
    if rules.causal:
        last = torch.arange(block.start, block.end, device=device)[:, None] + (block.total - block.queries)
        visible = key <= last  # [R, columns]
        if rules.prefix is not None:
            visible = visible | (key < rules.prefix.reshape(-1, 1, 1, 1))
    if rules.key_lengths is not None:
        inside = key < rules.key_lengths.reshape(-1, 1, 1, 1)
        visible = inside if visible is None else visible & inside
    return visible


def _probabilities(z: Tensor, log_sum: Tensor) -> Tensor:
    """Returns exp(z - log_sum); 0 in rows that see no key, where both are -inf."""
    return (z - log_sum.masked_fill(log_sum == float("-inf"), 0.0)[..., None]).exp()


def _dropped(probs: Tensor, rules: Rules, block: Block) -> Tensor:
    if rules.dropout == 0.0 or rules.keys is None:
        return probs
    heads = torch.arange(rules.first_head, rules.first_head + probs.shape[1], device=probs.device)
    queries = torch.arange(block.start, block.end, device=probs.device) + rules.first_row
    rows = ((heads << 32)[:, None] + queries).flatten()
    keep = kept_elements(row_keys(rules.keys, rows), block.columns, rules.dropout).reshape(probs.shape)
    return torch.where(keep, probs / (1.0 - rules.dropout), 0.0)


def _allocate(q, k, v, *rules):
    return empty_pooled(q), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


def _allocate_backward(grad, q, k, v, out, log_sum, relative_bias, *rules):
    bias = empty_placeholder(q) if relative_bias is None else torch.empty_like(relative_bias)
    return empty_pooled(q), empty_pooled(k), empty_pooled(v), bias


def _prepare(*arguments):
    return "no compiled kernel for attention"


_RULES = (
    "Tensor? relative_bias, Tensor? mask, Tensor? prefix, Tensor? key_lengths, Tensor? keys, float scale, "
    "bool causal, float dropout, SymInt first_head, SymInt first_row"
)
forward_op = Op(
    "attention",
    "Tensor q, Tensor k, Tensor v, " + _RULES,
    ("out", "log_sum"),
    allocate=_allocate,
    reference=_by_blocks,
    prepare=_prepare,
)
backward_op = Op(
    "attention_backward",
    "Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, " + _RULES,
    ("grad_q", "grad_k", "grad_v", "grad_bias"),
    allocate=_allocate_backward,
    reference=_backward_by_blocks,
    prepare=_prepare,
)


def _setup_context(ctx, inputs, output):
    q, k, v, *tensors = inputs[:8]
    ctx.settings = inputs[8:]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * 13
    *grads, grad_bias = backward_op(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, grad_bias if ctx.needs_input_grad[3] else None, *(None,) * 9


forward_op.autograd(_setup_context, _backward)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    relative_bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    prefix: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout: float = 0.0,
    keys: Tensor | None = None,
    first_head: int = 0,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, N, Sq, D], and of each row the log of its sum of exp [B, N, Sq], in fp32 (fp64 for fp64).

    Args:
        q: [B, N, Sq, D], fp32, bf16, fp16 or fp64.
        k, v: [B, K, Sk, D] in the dtype of q; each of the K heads serves N / K consecutive query heads.
        scale: Multiplies the scores.
        relative_bias: [N, Sq + Sk - 1], one number for each distance key - query, in the order of `lay_out_diagonals`;
            it gets a gradient.
        mask: Broadcastable to [B, N, Sq, Sk], with four dimensions. Boolean: True allows a key. Floating point: it is
            added, and gets no gradient.
        causal: Query i attends to the keys j <= i + Sk - Sq, so the last query attends to every key.
        prefix: int64 [B], only with `causal`: every query of sample b also attends to the keys j < prefix[b].
        key_lengths: int64 [B]; sample b has the keys j < key_lengths[b], whatever the other rules allow.
        dropout: The probability of dropping an attention probability; requires `keys`.
        keys: int64 [B] from `dropout_keys`.
        first_head, first_row: The head and the query of the unsplit sample where q begins.

    Raises:
        ValueError: The shapes do not match, a prefix is passed without `causal`, or dropout without keys.
    """
    _check_shapes(q, k, v, relative_bias, mask)
    _check_lengths(q.shape[0], causal, {"prefix": prefix, "key_lengths": key_lengths})
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {dropout}")
    if dropout and (keys is None or keys.dtype != torch.int64 or tuple(keys.shape) != (q.shape[0],)):
        raise ValueError(f"dropout needs int64 `keys`, one per sample, shape ({q.shape[0]},) (see dropout_keys)")
    tensors = (relative_bias, mask, prefix, key_lengths, keys if dropout else None)
    return forward_op(q, k, v, *tensors, float(scale), causal, float(dropout), first_head, first_row)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, relative_bias: Tensor | None, mask: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or k.shape[::3] != q.shape[::3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "attention needs q [B, N, Sq, D] and k, v [B, K, Sk, D] with N a multiple of K; got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    scores = (*q.shape[:3], k.shape[2])
    distances = (q.shape[1], q.shape[2] + k.shape[2] - 1)
    if relative_bias is not None and tuple(relative_bias.shape) != distances:
        raise ValueError(f"a relative bias is [N, Sq + Sk - 1] = {distances}, got {tuple(relative_bias.shape)}")
    if mask is None:
        return
    if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape, scores, strict=True)):
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to the scores {scores}; give it four dimensions")
    if mask.dtype != torch.bool and (not mask.is_floating_point() or mask.requires_grad):
        raise ValueError(
            f"a mask must be boolean (True allows a key) or numbers without a gradient, got {mask.dtype}; "
            "pass a trained bias as `relative_bias`"
        )


def _check_lengths(batch: int, causal: bool, lengths: dict[str, Tensor | None]) -> None:
    if lengths["prefix"] is not None and not causal:
        raise ValueError("a prefix needs causal=True; got causal=False")
    for name, tensor in lengths.items():
        if tensor is not None and (tuple(tensor.shape) != (batch,) or tensor.is_floating_point()):
            raise ValueError(
                f"{name} needs one integer per sample, shape ({batch},); got {tensor.dtype} {tuple(tensor.shape)}"
            )
