"""Computes attention whose probabilities never exist whole, forward and backward.

    z = cap(scale * q·kᵀ) + bias + mask,   out = dropout(softmax(z, over the keys))·v

Scores and probabilities exist for a part of the queries at a time, and the backward pass computes
them again from q and k, so the memory grows linearly with the sequence (as in FlashAttention, Dao
et al. 2022).

- The reference takes the queries in blocks, whose products and softmax are `matmul` and
  `masked_softmax` in whatever variant is chosen.
- Kernels take tiles of queries and keys. Their backward pass needs the output and, of each query,
  lse = log(sum(exp(z))), which is -inf without a key.
- The bias depends on the distance key - query alone: it is one number per head and diagonal of the
  scores, and so is its gradient.
- Which probabilities dropout keeps is a function of the sample, head, query and key alone
  (dropout_mask.py), so a block computes its own part of the mask.
- A query without any allowed key gets zeros.
- cap(x) is x, or softcap * tanh(x / softcap) (Gemma 2).

Shapes: B samples, N query heads, K key-value heads, Sq queries, Sk keys, D the size of a head, R
the queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import softmax
from .compiling import assume_constant_result
from .cpu.few_rows import WIDEST_HEAD
from .cpu.pool import empty_pooled
from .dispatcher import flop_counters, in_inference_mode
from .dropout_mask import keys_from_row
from .matmul import autocast_arguments, matmul
from .registration import Op, compute_dtype, empty_placeholder, same_dtype

# Bytes of the scores that exist at a time, over all samples and heads. On a CPU, smaller blocks are
# slower because the sums of the gradients of k and v are read and written more often; on an
# accelerator, they would leave it idle.
BYTES_AT_ONCE = {"cpu": 3 << 23, "cuda": 1 << 28}

# Queries of a block, whatever the number of its scores.
MIN_ROWS = 32

# Scores per head from which a kernel computes attention a tile at a time on a CPU.
MIN_TILED_SCORES = 64 * 64
# Scores per head from which the reference computes it a block at a time there.
MIN_BLOCKED_SCORES = 2048 * 2048
# The most scores per head for `eager_beats_sdpa`.
MAX_EAGER_SCORES = 512 * 512


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
    softcap: float | None = None,
) -> Tensor:
    """Computes attention; returns the output [B, N, Sq, D] in the dtype of q.

    Args:
        q: [B, N, Sq, D], fp32, bf16, fp16 or fp64.
        k: [B, K, Sk, D] in the dtype of q; each of the K heads serves N / K consecutive query
            heads.
        v: As k.
        scale: Multiplies the scores.
        relative_bias: [N, Sq + Sk - 1], one number for each distance key - query, in the order of
            `lay_out_diagonals`; it gets a gradient.
        mask: Broadcastable to [B, N, Sq, Sk], with four dimensions. Boolean: True allows a key.
            Floating point: it is added, and gets no gradient.
        causal: Query i attends to the keys j <= i + Sk - Sq, so the last query attends to every
            key.
        prefix: int64 [B], only with `causal`: every query of sample b also attends to the keys j <
            prefix[b].
        key_lengths: int64 [B]; sample b has the keys j < key_lengths[b], whatever the other rules
            allow.
        dropout: The probability of dropping an attention probability; requires `keys`.
        keys: int64 [B] from `dropout_keys`.
        first_head: The head of the unsplit sample where q begins.
        first_row: The query of the unsplit sample where q begins.
        softcap: The scaled scores become softcap * tanh(scores / softcap), before the bias and the
            mask are added.

    Raises:
        ValueError: The shapes do not match, a prefix is passed without `causal`, or dropout without
            keys.
    """
    check_arguments(q, k, v, relative_bias, mask, causal, prefix, key_lengths, dropout, keys)
    tensors = (relative_bias, mask, prefix, key_lengths, keys if dropout else None)
    flops_before = [(counter, counter.get_total_flops()) for counter in flop_counters()]
    out = forward_op(
        *autocast_arguments(q, k, v),
        *tensors,
        float(scale),
        causal,
        float(dropout),
        first_head,
        first_row,
        0.0 if softcap is None else float(softcap),
    )[0]
    if flops_before:
        count_products(flops_before, q, k, v)
    return out


def count_products(flops_before: list[tuple[Any, int]], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Tells counters of floating-point operations what attention has computed.

    Args:
        flops_before: The counters, and what each had counted before.
        q, k, v: Those of `attention`.
    """
    for counter, before in flops_before:
        # A counter sees the reference's products, but not a kernel's, which it is told here.
        if counter.get_total_flops() == before:
            flops = 2 * q.numel() * k.shape[2] + 2 * q.shape[:3].numel() * v.shape[2:].numel()
            counter.flop_counts["Global"][torch.ops.shardzoo.attention] += flops


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative_bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    prefix: Tensor | None,
    key_lengths: Tensor | None,
    dropout: float,
    keys: Tensor | None,
) -> None:
    """Raises ValueError if arguments of `attention` do not fit one another."""
    _check_shapes(q, k, v, relative_bias, mask)
    _check_lengths(q.shape[0], causal, {"prefix": prefix, "key_lengths": key_lengths})
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and less than 1, got {dropout}")
    if dropout and (
        keys is None or keys.dtype != torch.int64 or tuple(keys.shape) != (q.shape[0],)
    ):
        raise ValueError(
            f"dropout needs int64 `keys`, one per sample, shape ({q.shape[0]},) (see dropout_keys)"
        )


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, relative_bias: Tensor | None, mask: Tensor | None
) -> None:
    if (
        q.dim() != 4
        or k.dim() != 4
        or k.shape != v.shape
        or k.shape[::3] != q.shape[::3]
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            "attention needs q [B, N, Sq, D] and k, v [B, K, Sk, D] with N a multiple of K; got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    scores = (*q.shape[:3], k.shape[2])
    distances = (q.shape[1], q.shape[2] + k.shape[2] - 1)
    if relative_bias is not None and tuple(relative_bias.shape) != distances:
        raise ValueError(
            f"a relative bias is [N, Sq + Sk - 1] = {distances}, got {tuple(relative_bias.shape)}"
        )
    if mask is None:
        return
    if mask.dim() != 4 or any(
        size not in (1, full) for size, full in zip(mask.shape, scores, strict=True)
    ):
        raise ValueError(
            f"mask {tuple(mask.shape)} does not broadcast to the scores {scores}; give it four dimensions"
        )
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


# Questions of the layers: which way of computing attention is the fastest.


def suits_tiles(queries: int, keys: int, device: str, itemsize: int) -> bool:
    """Returns whether attention with dropout, a trained bias or a soft cap should compute a tile or
    block of the scores at a time.

    Kernels are faster than products and a softmax of whole scores, but for the shortest sequences
    on a CPU. Without them, the scores of shorter sequences are written to memory: the backward pass
    need not compute them again.

    Args:
        queries: Sq.
        keys: Sk.
        device: PyTorch's type of device.
        itemsize: Bytes of an element of q.
    """
    if queries == 1 or device != "cpu":
        return queries > 1
    if has_attention_kernel(device, itemsize):
        return queries * keys >= MIN_TILED_SCORES
    return queries * keys >= MIN_BLOCKED_SCORES


@assume_constant_result
def has_attention_kernel(device: str, itemsize: int) -> bool:
    """Returns whether attention has a kernel: not in fp64, and otherwise always on an accelerator.

    The accelerator need not be in this machine, which may only estimate what a step needs there.
    """
    if itemsize >= 8:
        return False
    return device != "cpu" or forward_op.choose_variant(device) != "reference"


def lacks_fused_attention(q: Tensor) -> bool:
    """Returns whether `scaled_dot_product_attention` is slower than tiles for queries in training.

    It is on a CPU. Passes without gradients count too, so that one that is repeated with them
    rounds alike.
    """
    return q.is_cpu and not in_inference_mode()


def eager_beats_sdpa(q: Tensor, k: Tensor) -> bool:
    """Returns whether two matrix products and a softmax are faster than
    `scaled_dot_product_attention` in training.

    They are for 16-bit types on a CPU: 12 ms against 26 for 4 × 12 heads of 64 at 256 positions, 53
    against 87 at 512. Longer sequences would need too much memory.
    """
    has_gradient = torch.is_grad_enabled() and q.requires_grad
    return has_gradient and writes_scores(q.shape[2], k.shape[2], q.device.type, q.dtype.itemsize)


def writes_scores(queries: int, keys: int, device: str, itemsize: int) -> bool:
    """Answers `eager_beats_sdpa` for training from sizes alone; `device` is PyTorch's type of device."""
    return device == "cpu" and itemsize == 2 and queries * keys <= MAX_EAGER_SCORES


# The reference: the definition, a block of queries at a time.


class ScoreRules(NamedTuple):
    """Holds what applies to the scores besides q and k, with the names and order of the schema.

    The fields are the arguments of `attention`.
    """

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
    softcap: float  # 0 for none


class QueryBlock(NamedTuple):
    """Describes the scores of consecutive queries with the keys that any of them may see.

    Args:
        start: The first query.
        end: One after the last query.
        columns: The number of keys; no later key is visible to these queries.
        first_distance: Where the block's diagonals begin in the relative bias.
        diagonal: The number of keys that the causal rule allows the last query.
    """

    start: int
    end: int
    columns: int
    first_distance: int
    diagonal: int


@torch.no_grad()
def reference(q, k, v, *arguments):
    """Computes the output [B, N, Sq, D] and lse [B, N, Sq] block by block.

    The arguments are q, k, v and the fields of `ScoreRules`.
    """
    rules = ScoreRules(*arguments)
    k = k.contiguous()
    v = v.contiguous()
    out, lse = _allocate(q)
    for block in _split_queries(q, k, rules):
        rows = slice(block.start, block.end)
        if not block.columns:
            out[:, :, rows] = 0.0
            lse[:, :, rows] = float("-inf")
            continue
        scores = _compute_scores(q, k, block)
        probs, dropped = _compute_probabilities(scores, rules, block)
        lse[:, :, rows] = _compute_lse(scores, probs, rules, block)
        weights = dropped if rules.dropout else probs  # [B, N, R, columns]
        out[:, :, rows] = matmul(_fold_heads(weights, k), _take_columns(v, block)).view(
            q[:, :, rows].shape
        )
    return out, lse


def _compute_lse(scores, probs, rules, block):
    """Returns lse [B, N, R] of a block.

    The largest probability of a query is exp(z - lse), with the z of its key. So z is computed for
    this key alone.
    """
    largest, key = probs.to(compute_dtype(probs)).max(-1, keepdim=True)  # [B, N, R, 1]
    z = scores.gather(3, key).to(largest.dtype) * rules.scale
    if rules.softcap:
        z = torch.tanh(z / rules.softcap) * rules.softcap
    if rules.relative_bias is not None:
        query = torch.arange(block.start, block.end, device=key.device)[:, None]
        head = torch.arange(key.shape[1], device=key.device)[:, None, None]
        z += rules.relative_bias[head, key - query + (block.first_distance + block.end - 1)]
    mask = _slice_mask(rules, block)
    if mask is not None and mask.dtype != torch.bool:
        z += mask.expand(scores.shape).gather(3, key)
    lse = torch.where(largest == 0.0, float("-inf"), z - largest.log())
    return lse.squeeze(-1)


@torch.no_grad()
def backward_reference(grad, out, lse, q, k, v, *arguments):
    """Returns the gradients of q, k, v and of the relative bias, in their shapes and dtypes.

    Those of k, v and the bias are summed over the blocks in fp32 (fp64 for fp64). This reference
    computes the probabilities again, so it does not need `out` and `lse`.
    """
    rules = ScoreRules(*arguments)
    k = k.contiguous()
    v = v.contiguous()
    wide = torch.promote_types(q.dtype, torch.float32)
    bias = rules.relative_bias
    grad_q = empty_pooled(q)
    grad_k = torch.zeros_like(k, dtype=wide)
    grad_v = torch.zeros_like(v, dtype=wide)
    grad_bias = empty_placeholder(q) if bias is None else torch.zeros_like(bias, dtype=wide)
    for block in _split_queries(q, k, rules):
        rows = slice(block.start, block.end)
        if not block.columns:
            grad_q[:, :, rows] = 0.0
            continue
        grad_scores, grad_block_bias = _backward_scores(grad, q, k, v, rules, block, grad_v)
        if bias is not None:
            sums = softmax.sum_diagonals(grad_block_bias[0])
            grad_bias[:, block.first_distance :][:, : sums.shape[1]] += sums
        grad_scores = _fold_heads(grad_scores, k)
        grad_q[:, :, rows] = matmul(grad_scores, _take_columns(k, block)).view(q[:, :, rows].shape)
        _add_product(_take_columns(grad_k, block), grad_scores.mT, _fold_heads(q[:, :, rows], k))
    if bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias


def _backward_scores(grad, q, k, v, rules, block, grad_v):
    """Computes a block's part of the backward pass from the output to the scores.

    Adds the gradient of v to `grad_v`.

    Returns:
        The gradients of the scores [B, N, R, columns] and of the bias [1, N, R, columns], which has
        size 0 without a bias.
    """
    scores = _compute_scores(q, k, block)
    probs, dropped = _compute_probabilities(scores, rules, block)
    weights = dropped if rules.dropout else probs
    grad_out = _fold_heads(grad[:, :, block.start : block.end], k)
    _add_product(_take_columns(grad_v, block), _fold_heads(weights, k).mT, grad_out)
    # The next tensor is as large as these.
    del dropped, weights
    grad_weights = matmul(grad_out, _take_columns(v, block).mT).view(probs.shape)
    keys = _find_dropout_keys(rules, block)
    bias_batch = 0 if rules.relative_bias is None else 1
    scale = 1.0 if rules.softcap else rules.scale
    grad_scores, grad_bias = softmax.backward_op(
        grad_weights, probs, keys, scale, rules.dropout, rules.first_head, bias_batch
    )
    if rules.softcap:
        slope = 1 - torch.tanh(scores * (rules.scale / rules.softcap)).square()
        grad_scores = grad_scores * slope * rules.scale
    return grad_scores, grad_bias


def _split_queries(q: Tensor, k: Tensor, rules: ScoreRules) -> Iterator[QueryBlock]:
    """Yields blocks of queries, each with the keys up to the last that one of them may see."""
    batch, heads, queries, _ = q.shape
    total = k.shape[2]
    rows = choose_block_rows(batch * heads * total * q.itemsize, q.device.type)
    longest_prefix = _find_longest(rules.prefix, 0)
    longest = min(_find_longest(rules.key_lengths, total), total)
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        diagonal = end + total - queries
        limit = max(diagonal, longest_prefix) if rules.causal else total
        columns = max(min(limit, longest), 0)
        yield QueryBlock(start, end, columns, queries - end, diagonal)


def _find_longest(lengths: Tensor | None, default: int) -> int:
    return default if lengths is None or not lengths.numel() else int(lengths.max())


def choose_block_rows(size: int, device: str) -> int:
    """Returns the number of queries of a block.

    Args:
        size: Bytes of one query's scores over all samples and heads.
        device: PyTorch's type of device.
    """
    return max(MIN_ROWS, BYTES_AT_ONCE.get(device, BYTES_AT_ONCE["cuda"]) // max(size, 1))


def _compute_scores(q: Tensor, k: Tensor, block: QueryBlock) -> Tensor:
    """Returns a block's products of queries and keys, [B, N, R, columns]."""
    rows = q[:, :, block.start : block.end]
    return matmul(_fold_heads(rows, k), _take_columns(k, block).mT).view(
        *rows.shape[:3], block.columns
    )


def _compute_probabilities(
    scores: Tensor, rules: ScoreRules, block: QueryBlock
) -> tuple[Tensor, Tensor]:
    """Returns a block's probabilities [B, N, R, columns], and those with dropout (of size 0
    without dropout).
    """
    scale = rules.scale
    if rules.softcap:
        scores = cap_scores(scores, scale, rules.softcap)
        scale = 1.0
    bias = rules.relative_bias
    if bias is not None:
        # Row i of the scores begins at Sq - 1 - i, so the block's last row comes first. `flip`
        # would lay the result out by columns.
        size = block.end - block.start
        diagonals = (
            bias[:, block.first_distance :][:, : size + block.columns - 1]
            .to(scores.dtype)
            .unfold(1, block.columns, 1)
        )
        bias = diagonals.index_select(1, torch.arange(size, device=scores.device).flip(0))[None]
    causal = rules.causal and block.columns == block.diagonal
    prefix = None
    others = rules
    if causal:
        # The softmax applies these two rules itself.
        prefix = rules.prefix
        others = rules._replace(causal=False, prefix=None)
    mask = _build_mask(others, block, scores.device)
    keys = _find_dropout_keys(rules, block)
    return softmax.forward_op(
        scores, mask, bias, prefix, keys, scale, causal, rules.dropout, rules.first_head
    )


def cap_scores(scores: Tensor, scale: float, softcap: float) -> Tensor:
    """Returns softcap * tanh(scale * scores / softcap), in the dtype of the scores (Gemma 2)."""
    return torch.tanh(scores * (scale / softcap)) * softcap


def _find_dropout_keys(rules: ScoreRules, block: QueryBlock) -> Tensor | None:
    """Returns keys [B] with which row 0 has the mask of the block's first query."""
    return None if rules.keys is None else keys_from_row(rules.keys, rules.first_row + block.start)


def _build_mask(rules: ScoreRules, block: QueryBlock, device: torch.device) -> Tensor | None:
    """Returns the mask of a block with all rules applied, boolean or of numbers that are added."""
    mask = _slice_mask(rules, block)
    visible = _find_visible_keys(rules, block, device)
    if visible is None:
        return mask
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return mask & visible
    return torch.where(visible, mask, float("-inf"))


def _slice_mask(rules: ScoreRules, block: QueryBlock) -> Tensor | None:
    """Returns the part of the mask for the block's scores; a dimension of size 1 still broadcasts."""
    mask = rules.mask
    if mask is None:
        return None
    if mask.shape[2] != 1:
        mask = mask[:, :, block.start : block.end]
    if mask.shape[3] != 1:
        mask = mask[..., : block.columns]
    return mask


def _find_visible_keys(rules: ScoreRules, block: QueryBlock, device: torch.device) -> Tensor | None:
    """Returns which keys the causal rule, the prefix and the lengths allow, broadcastable to the
    block's scores.
    """
    key = torch.arange(block.columns, device=device)
    visible = None
    if rules.causal:
        # The number of keys that the causal rule allows each query.
        allowed = torch.arange(block.start - block.end, 0, device=device) + 1 + block.diagonal
        visible = key < allowed[:, None]  # [R, columns]
        if rules.prefix is not None:
            visible = visible | (key < rules.prefix.reshape(-1, 1, 1, 1))
    if rules.key_lengths is not None:
        inside = key < rules.key_lengths.reshape(-1, 1, 1, 1)
        visible = inside if visible is None else visible & inside
    return visible


def _fold_heads(x: Tensor, k: Tensor) -> Tensor:
    """Returns x [B, N, R, C] as [B * K, N / K * R, C]: the rows of all query heads that share a
    key-value head of k [B, K, Sk, D].
    """
    return x.reshape(k.shape[0] * k.shape[1], -1, x.shape[3])


def _take_columns(x: Tensor, block: QueryBlock) -> Tensor:
    """Returns the block's keys of a contiguous [B, K, Sk, D] as a view [B * K, columns, D]."""
    return x.flatten(0, 1)[:, : block.columns]


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Adds x·y to `total`, which is fp32 for 16-bit factors."""
    if total.dtype == x.dtype:
        total.baddbmm_(x, y)
    else:
        total += matmul(x, y)


# The gradient formula.


def save_for_attention_backward(ctx, inputs, output, tensors):
    """Keeps what the backward pass of an operator of attention needs: (out, lse), the first inputs,
    which are so many tensors, and the other ones as `ctx.settings`.
    """
    ctx.settings = inputs[tensors:]
    ctx.save_for_backward(*output, *inputs[:tensors])
    ctx.mark_non_differentiable(output[1])
    # Without this, lse would get a gradient of zeros.
    ctx.set_materialize_grads(False)


def _setup_context(ctx, inputs, output):
    # The first eight inputs are tensors: q, k, v, relative_bias, mask, prefix, key_lengths, keys.
    save_for_attention_backward(ctx, inputs, output, tensors=8)


def _backward(ctx, grad, _):
    grad_q, grad_k, grad_v, grad_bias = backward_op(grad, *ctx.saved_tensors, *ctx.settings)
    if not ctx.needs_input_grad[3]:
        grad_bias = None
    return grad_q, grad_k, grad_v, grad_bias, *(None,) * 10


# The registration.

_RULES = (
    "Tensor? relative_bias, Tensor? mask, Tensor? prefix, Tensor? key_lengths, Tensor? keys, float scale, "
    "bool causal, float dropout, SymInt first_head, SymInt first_row, float softcap"
)


def _allocate(q, *_):
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    return _empty_heads(q), lse


def _allocate_backward(grad, out, lse, q, k, v, relative_bias, *rules):
    if relative_bias is None:
        grad_bias = empty_placeholder(q)
    else:
        grad_bias = relative_bias.new_empty(relative_bias.shape)
    return _empty_heads(q), _empty_heads(k), _empty_heads(v), grad_bias


def _empty_heads(x):
    """Returns [B, N, S, D] whose heads of a position are adjacent, so that merging them copies
    nothing.
    """
    batch, heads, length, size = x.shape
    return empty_pooled(x, batch, length, heads, size).transpose(1, 2)


def _prepare(q, k, v, *rules):
    return find_obstacle(q, k, v, rules) or (
        *_make_rows_dense(q, k, v),
        *_prepare_rules(q, k, *rules),
    )


def _prepare_compiled(q, k, v, bias, *others):
    return _prepare(q, k, v, _widen(bias), *others)


def _prepare_backward_compiled(grad, out, lse, q, k, v, bias, *others):
    return _prepare_backward(grad, out, lse, q, k, v, _widen(bias), *others)


def _widen(bias):
    """Returns a 16-bit bias in fp32, as the C++ kernels read it."""
    return bias.float() if bias is not None and bias.itemsize == 2 else bias


def _prepare_backward(grad, out, lse, q, k, v, *rules):
    return find_obstacle(q, k, v, rules) or (
        *_make_rows_dense(grad, out),
        lse.contiguous(),
        *_make_rows_dense(q, k, v),
        *_prepare_rules(q, k, *rules),
    )


def _make_rows_dense(*tensors):
    """Returns tensors with the numbers of a row adjacent; the rows may be anywhere."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _prepare_rules(q, k, relative_bias, mask, prefix, key_lengths, keys, *settings):
    """Returns the mask with all dimensions, of which a broadcast one has stride 0, and the other
    tensors dense, integers as int64.
    """
    return (
        None if relative_bias is None else relative_bias.contiguous(),
        None if mask is None else mask.expand(*q.shape[:3], k.shape[2]),
        *[
            None if x is None else x.to(torch.int64).contiguous()
            for x in (prefix, key_lengths, keys)
        ],
        *settings,
    )


def find_obstacle(q, k, v, rules):
    """Returns why the kernels cannot take a call, or None if they can.

    Args:
        rules: The fields of `ScoreRules`.
    """
    bias, mask = rules[:2]
    if q.dtype == torch.float64 or (bias is not None and bias.dtype == torch.float64):
        return "the kernels compute in fp32"
    if q.shape[3] > WIDEST_HEAD:
        return f"heads wider than {WIDEST_HEAD}"
    added = mask if mask is not None and mask.dtype != torch.bool else None
    return "an empty tensor" if k.numel() == 0 else same_dtype(q, k, v, added)


def _launch_triton(*arguments):
    from .triton_kernels.attention import launch_forward

    launch_forward(*arguments)


def _launch_triton_backward(*arguments):
    from .triton_kernels.attention import launch_backward

    launch_backward(*arguments)


forward_op = Op(
    "attention",
    "Tensor q, Tensor k, Tensor v, " + _RULES,
    ("out", "lse"),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
    compiled=("cpp",),
    prepare_compiled=_prepare_compiled,
    triton=_launch_triton,
)

backward_op = Op(
    "attention_backward",
    "Tensor grad, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, " + _RULES,
    ("grad_q", "grad_k", "grad_v", "grad_bias"),
    allocate=_allocate_backward,
    reference=backward_reference,
    prepare=_prepare_backward,
    compiled=("cpp",),
    prepare_compiled=_prepare_backward_compiled,
    triton=_launch_triton_backward,
)

forward_op.autograd(_setup_context, _backward)
