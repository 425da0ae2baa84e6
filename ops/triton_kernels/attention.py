"""Attention and its gradients in Triton, a tile of scores at a time, in the order of
FlashAttention-2 (Dao 2023).

    forward         a program computes a block of queries, walking over the keys with an online softmax
    query_gradient  the same order: the gradient of q, and what the next kernels need of a query (delta, dropout's key)
    key_gradient    a program computes the gradients of a block of keys, walking over the queries
    bias_gradient   a program walks along a diagonal of tiles. An element of these tiles always has the same distance,
                    so the tiles are added element by element, and only their sum is folded into diagonals

Nothing is added atomically, so results are reproducible. Tiles that no query sees are not computed,
and the rules about positions are applied only in tiles that they cut. Exponentials have base 2, as
the hardware computes them: `z` stands for log2(e) times a score. Scores, statistics and sums are
fp32; factors of a product are rounded to the dtype of q.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from ..device import is_for_amd
from ..dropout_mask import dropout_threshold
from ..registration import contiguous
from .common import ceil_div, is_kept, next_power_of_2, row_key
from .launching import describe, launch

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The programs of `bias_gradient`, if there are enough samples to share out.
PROGRAMS = 512


class TileShape(NamedTuple):
    """The queries and keys of a tile, the warps of a program, and how many tiles are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class CallSizes(NamedTuple):
    """Holds the sizes of the whole call; `queries_per_kv` query heads share a key-value head.

    Samples without padding have lengths of their own, and `queries` and `keys` are the longest.
    """

    heads: int
    queries_per_kv: int
    queries: int
    keys: int


class KernelRules(NamedTuple):
    """What applies to the scores: tensors first, then numbers.

    A rule that does not apply is None, which a kernel knows when it is compiled. `bias_stride` is the
    number of distances of a head's bias, `bias_center` the place of distance 0. `query_starts` and
    `key_starts` say where the samples begin among the rows of tensors without padding, and where the
    last one ends.
    """

    bias: torch.Tensor | None
    mask: torch.Tensor | None
    prefix: torch.Tensor | None
    lengths: torch.Tensor | None
    sample_keys: torch.Tensor | None
    query_starts: torch.Tensor | None
    key_starts: torch.Tensor | None
    bias_stride: int
    bias_center: int
    mask_strides: tuple[int, ...] | None
    scale: float
    softcap: float | None
    keep_scale: float
    threshold: int
    first_head: int
    first_row: int


# The number of rules that are tensors.
TENSOR_RULES = KernelRules._fields.index("bias_stride")


class Call(NamedTuple):
    """What the kernels of a call have in common.

    Attributes:
        inputs: The tensors that kernels read, the strided ones [B, N, S, D] first: q, k, v, and the
            output, or its gradient and the output.
        strides: Those of B, N and S of the strided tensors; that of D is 1.
        description: What Triton compiles for all of this depends on; see `describe`.
    """

    inputs: tuple[torch.Tensor | None, ...]
    strides: tuple[tuple[int, ...], ...]
    sizes: CallSizes
    rules: KernelRules
    causal: bool
    description: tuple[Any, ...]


@triton.jit
def sizes_of_sample(b, sizes, rules):
    """Returns the sizes with the queries and keys of sample b."""
    queries = sizes.queries
    keys = sizes.keys
    if rules.query_starts is not None:
        at = rules.query_starts + b
        queries = (tl.load(at + 1) - tl.load(at)).to(tl.int32)
        at = rules.key_starts + b
        keys = (tl.load(at + 1) - tl.load(at)).to(tl.int32)
    return CallSizes(sizes.heads, sizes.queries_per_kv, queries, keys)


@triton.jit
def first_place(starts, b, length):
    """Returns the rows of all samples before sample b, where each has `length` or begins as `starts` says."""
    if starts is None:
        place = tl.cast(b, tl.int64) * length
    else:
        place = tl.load(starts + b).to(tl.int64)
    return place


@triton.jit
def head_start(x_ptr, strides, starts, b, n):
    if starts is None:
        sample = tl.cast(b, tl.int64) * strides[0]
    else:
        sample = tl.load(starts + b).to(tl.int64) * strides[2]
    return x_ptr + sample + tl.cast(n, tl.int64) * strides[1]


@triton.jit
def statistics_start(b, n, sizes, rules):
    """Returns where the numbers of a head's queries begin: a sample has its heads one after another."""
    first = first_place(rules.query_starts, b, sizes.queries)
    return first * sizes.heads + tl.cast(n, tl.int64) * sizes.queries


@triton.jit
def load_rows(x_ptr, stride, first, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Returns the rows from `first` of a matrix [rows, WIDTH]: [ROWS, D], zero outside.

    No rows means no limit.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    at = x_ptr + tl.cast(first, tl.int64) * stride + (row * stride + column)
    if rows is not None:
        value = tl.load(at, mask=(row < rows - first) & (column < WIDTH), other=0.0)
    elif WIDTH < D:
        value = tl.load(at, mask=column < WIDTH, other=0.0)
    else:
        value = tl.load(at)
    return value


@triton.jit
def store_rows(
    x_ptr, stride, value, first, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    at = x_ptr + tl.cast(first, tl.int64) * stride + (row * stride + column)
    tl.store(at, value.to(x_ptr.dtype.element_ty), mask=(row < rows - first) & (column < WIDTH))


@triton.jit
def product(x, y, total, PRECISION: tl.constexpr):
    """Returns total + x·y in fp32.

    Triton's interpreter multiplies no bf16, so there the factors are widened.
    """
    if PRECISION == "interpreted":
        result = tl.dot(x.to(tl.float32), y.to(tl.float32), total)
    else:
        result = tl.dot(x, y, total, input_precision=PRECISION)
    return result


@triton.jit
def key_limit(b, sizes, rules):
    """Returns the number of keys of sample b."""
    if rules.lengths is None:
        limit = tl.cast(sizes.keys, tl.int32)
    else:
        limit = tl.minimum(tl.load(rules.lengths + b), sizes.keys).to(tl.int32)
    return limit


@triton.jit
def visible_end(row, b, limit, sizes, rules, CAUSAL: tl.constexpr):
    """Returns where the keys end that a query may see."""
    end = limit + row * 0
    if CAUSAL:
        diagonal = row + (sizes.keys - sizes.queries + 1)
        if rules.prefix is not None:
            diagonal = tl.maximum(diagonal, tl.load(rules.prefix + b)).to(tl.int32)
        end = tl.minimum(diagonal, limit)
    return end


@triton.jit
def block_of_head(rows, heads, ROWS: tl.constexpr):
    """Returns the first row of the program's block, its sample and its head."""
    blocks = tl.cdiv(rows, ROWS)
    # With the causal rule, the last blocks have the most keys; these programs start first.
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    return first, tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads


@triton.jit
def keys_of_block(
    first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, b, sizes, rules, CAUSAL: tl.constexpr
):
    """Returns the start of the tiles whose keys only some of the queries from `first` see, and the
    end of all tiles.
    """
    limit = key_limit(b, sizes, rules)
    last = tl.minimum(first + ROWS, sizes.queries) - 1
    cut = tl.maximum(visible_end(first, b, limit, sizes, rules, CAUSAL), 0) // COLUMNS * COLUMNS
    stop = visible_end(last, b, limit, sizes, rules, CAUSAL)
    if rules.query_starts is not None:
        # The block is behind the last query of a sample that is shorter than the longest.
        has_queries = first < sizes.queries
        cut = tl.where(has_queries, cut, 0)
        stop = tl.where(has_queries, stop, 0)
    return cut, stop


@triton.jit
def tanh(x):
    """Returns tanh(x) to fp32's precision: near 0, where 1 - 2 / (exp(2 x) + 1) cancels, by its series."""
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    series = series * square * x + x
    return tl.where(square < 0.05, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def scaled_scores(products, rules):
    """Returns the scores of a tile from its q·k: scaled, capped, and times log2(e)."""
    if rules.softcap is None:
        scores = products * (rules.scale * LOG2_E)
    else:
        scores = tanh(products * (rules.scale / rules.softcap)) * (rules.softcap * LOG2_E)
    return scores


@triton.jit
def slope_of_cap(scores, rules):
    """Returns the derivative of the soft cap at `scaled_scores`."""
    share = scores * (1.0 / (rules.softcap * LOG2_E))
    return 1.0 - share * share


@triton.jit
def bias_of_tile(
    first_row, first_column, n, sizes, rules, A: tl.constexpr, B: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """Returns the bias of a tile [A, B] of queries and keys, or of keys and queries with KEYS_FIRST.

    A tile has as many different numbers as diagonals, so these alone are read, and each element takes its own.
    """
    ROWS: tl.constexpr = B if KEYS_FIRST else A
    LENGTH: tl.constexpr = 2 * A if A > B else 2 * B  # a power of 2 that holds A + B - 1 diagonals
    distance = first_column - first_row - (ROWS - 1) + tl.arange(0, LENGTH)
    inside = (distance > -sizes.queries) & (distance < sizes.keys)
    head_bias = rules.bias + tl.cast(n, tl.int64) * rules.bias_stride + rules.bias_center
    diagonals = tl.load(head_bias + distance, mask=inside, other=0.0).to(tl.float32)
    if KEYS_FIRST:
        diagonal = tl.arange(0, A)[:, None] - tl.arange(0, B)[None, :] + (ROWS - 1)
    else:
        diagonal = tl.arange(0, B)[None, :] - tl.arange(0, A)[:, None] + (ROWS - 1)
    return tl.reshape(tl.gather(diagonals, tl.reshape(diagonal, [A * B]), 0), [A, B])


@triton.jit
def apply_rules(
    scores, row, column, end, first_row, first_column, b, n, sizes, rules, CUT: tl.constexpr
):
    """Returns z of a tile from its scores, -inf at hidden keys.

    `row`, `column` and `end`, the number of keys that a query sees, broadcast to the tile, whose first query and key
    are `first_row` and `first_column`. Without CUT, the queries see all of its keys that the mask allows.
    """
    z = scores
    visible = column < end
    if rules.bias is not None:
        keys_first: tl.constexpr = row.shape[0] == 1
        bias = bias_of_tile(
            first_row, first_column, n, sizes, rules, scores.shape[0], scores.shape[1], keys_first
        )
        z += bias * LOG2_E
    if rules.mask is not None:
        head_mask = head_start(rules.mask, rules.mask_strides, None, b, n)
        row = tl.minimum(row, sizes.queries - 1)
        row_mask = head_mask + row.to(tl.int64) * rules.mask_strides[2]
        at = row_mask + column * rules.mask_strides[3]
        mask = tl.load(at, mask=visible, other=0) if CUT else tl.load(at)
        if rules.mask.dtype.element_ty == tl.uint8:
            z = tl.where(mask != 0, z, float("-inf"))
        else:
            z += mask.to(tl.float32) * LOG2_E
    return tl.where(visible, z, float("-inf")) if CUT else z


@triton.jit
def keys_of_rows(row, b, n, rules):
    """Returns the dropout keys of a head's queries."""
    head = tl.cast(n, tl.int64) + rules.first_head
    return row_key(tl.load(rules.sample_keys + b), (head << 32) + rules.first_row + row)


@triton.jit
def attend(
    state, q, k_ptr, v_ptr, strides, start, stop, first, row, row_keys, b, n, sizes, rules, CAUSAL: tl.constexpr, CUT:
    tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, stop) to an online softmax: the largest z, the sum of exponentials, and
    that of p·v.
    """
    top, total, out = state
    end = visible_end(row, b, key_limit(b, sizes, rules), sizes, rules, CAUSAL)[:, None]
    for j in tl.range(start, stop, COLUMNS):
        column = j + tl.arange(0, COLUMNS)[None, :]
        k = load_rows(k_ptr, strides[1][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        products = product(q, tl.trans(k), None, PRECISION)
        scores = scaled_scores(products, rules)
        z = apply_rules(scores, row[:, None], column, end, first, j, b, n, sizes, rules, CUT)
        higher = tl.maximum(top, tl.max(z, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(z - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        if row_keys is not None:
            p = tl.where(is_kept(row_keys[:, None], column, rules.threshold), p, 0.0)
        v = load_rows(v_ptr, strides[2][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        out = product(p.to(v.dtype), v, out * rescale[:, None], PRECISION)
        top = higher
    return top, total, out


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, strides, sizes, rules, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, b, n = block_of_head(sizes.queries, sizes.heads, ROWS)
    sizes = sizes_of_sample(b, sizes, rules)
    row = first + tl.arange(0, ROWS)
    row_keys = None if rules.sample_keys is None else keys_of_rows(row, b, n, rules)
    q = load_rows(
        head_start(q_ptr, strides[0], rules.query_starts, b, n),
        strides[0][2],
        first,
        sizes.queries,
        WIDTH,
        ROWS,
        D,
    )
    k_ptr = head_start(k_ptr, strides[1], rules.key_starts, b, n // sizes.queries_per_kv)
    v_ptr = head_start(v_ptr, strides[2], rules.key_starts, b, n // sizes.queries_per_kv)
    cut, stop = keys_of_block(first, ROWS, COLUMNS, b, sizes, rules, CAUSAL)
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, D], tl.float32),
    )
    state = attend(
        state, q, k_ptr, v_ptr, strides, 0, cut, first, row, row_keys, b, n, sizes, rules, CAUSAL, False, PRECISION,
        WIDTH, D, COLUMNS,
    )  # fmt: skip
    top, total, out = attend(
        state, q, k_ptr, v_ptr, strides, cut, stop, first, row, row_keys, b, n, sizes, rules, CAUSAL, True, PRECISION,
        WIDTH, D, COLUMNS,
    )  # fmt: skip
    empty = total == 0.0
    out *= tl.where(empty, 0.0, rules.keep_scale / tl.where(empty, 1.0, total))[:, None]
    lse = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    at = statistics_start(b, n, sizes, rules)
    out_ptr = head_start(out_ptr, strides[3], rules.query_starts, b, n)
    store_rows(out_ptr, strides[3][2], out, first, sizes.queries, WIDTH, ROWS, D)
    tl.store(lse_ptr + at + row, lse, mask=row < sizes.queries)


@triton.jit
def tile_gradient(
    left, right, left_grad, right_grad, row, column, end, first_row, first_column, lse, delta, row_keys, b, n, sizes,
    rules, CUT: tl.constexpr, PRECISION: tl.constexpr, OF_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Returns a tile's probabilities, with dropout but for its factor, and the gradient of its z but for log2(e), or
    with OF_PRODUCTS that of its products of q and k, but for the scale.

    The products of `left` and `right` (q and k, or k and q) are the scores; those of `left_grad`
    and `right_grad` (the gradient of the output and v, or the reverse), the gradients of the
    probabilities.
    """
    products = product(left, tl.trans(right), None, PRECISION)
    scores = scaled_scores(products, rules)
    z = apply_rules(scores, row, column, end, first_row, first_column, b, n, sizes, rules, CUT)
    p = tl.exp2(z - lse)
    grad = product(left_grad, tl.trans(right_grad), None, PRECISION)
    weights = p
    if row_keys is not None:
        keep = is_kept(row_keys, column, rules.threshold)
        weights = tl.where(keep, p, 0.0)
        grad = tl.where(keep, grad * rules.keep_scale, 0.0)
    grad_z = p * (grad - delta)
    if OF_PRODUCTS:  # noqa: SIM102 - Triton decides each at compile time
        if rules.softcap is not None:
            grad_z *= slope_of_cap(scores, rules)
    return weights, grad_z


@triton.jit
def load_lse(lse_ptr, at, inside):
    """Returns lse to base 2.

    It is infinite where there is no key or no query, so that all probabilities are 0.
    """
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf")) * LOG2_E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def add_query_gradient(
    grad_q, q, grad, k_ptr, v_ptr, strides, start, stop, first, row, lse, delta, row_keys, b, n, sizes, rules, CAUSAL:
    tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, COLUMNS:
    tl.constexpr,
):  # fmt: skip
    """Adds what the keys [start, stop) contribute to the gradient of a block of queries."""
    end = visible_end(row, b, key_limit(b, sizes, rules), sizes, rules, CAUSAL)
    for j in tl.range(start, stop, COLUMNS):
        column = j + tl.arange(0, COLUMNS)[None, :]
        k = load_rows(k_ptr, strides[1][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        v = load_rows(v_ptr, strides[2][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        _, grad_z = tile_gradient(
            q, k, grad, v, row, column, end, first, j, lse, delta, row_keys, b, n, sizes, rules, CUT, PRECISION, True
        )  # fmt: skip
        grad_q = product(grad_z.to(k.dtype), k, grad_q, PRECISION)
    return grad_q


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, lse_ptr, delta_ptr, row_keys_ptr, grad_q_ptr, strides, sizes, rules,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    first, b, n = block_of_head(sizes.queries, sizes.heads, ROWS)
    sizes = sizes_of_sample(b, sizes, rules)
    row = first + tl.arange(0, ROWS)
    at = statistics_start(b, n, sizes, rules)
    grad = load_rows(
        head_start(grad_ptr, strides[3], rules.query_starts, b, n),
        strides[3][2],
        first,
        sizes.queries,
        WIDTH,
        ROWS,
        D,
    )
    out = load_rows(
        head_start(out_ptr, strides[4], rules.query_starts, b, n),
        strides[4][2],
        first,
        sizes.queries,
        WIDTH,
        ROWS,
        D,
    )
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), axis=1)
    tl.store(delta_ptr + at + row, delta, mask=row < sizes.queries)
    if row_keys_ptr is None:
        row_keys = None
    else:
        row_keys = keys_of_rows(row, b, n, rules)[:, None]
        tl.store(
            row_keys_ptr + at + row[:, None],
            row_keys.to(tl.int64),
            mask=row[:, None] < sizes.queries,
        )
    lse = load_lse(lse_ptr, at + row, row < sizes.queries)[:, None]
    delta = delta[:, None]
    q = load_rows(
        head_start(q_ptr, strides[0], rules.query_starts, b, n),
        strides[0][2],
        first,
        sizes.queries,
        WIDTH,
        ROWS,
        D,
    )
    k_ptr = head_start(k_ptr, strides[1], rules.key_starts, b, n // sizes.queries_per_kv)
    v_ptr = head_start(v_ptr, strides[2], rules.key_starts, b, n // sizes.queries_per_kv)
    cut, stop = keys_of_block(first, ROWS, COLUMNS, b, sizes, rules, CAUSAL)
    grad_q = tl.zeros([ROWS, D], tl.float32)
    row = row[:, None]
    grad_q = add_query_gradient(
        grad_q, q, grad, k_ptr, v_ptr, strides, 0, cut, first, row, lse, delta, row_keys, b, n, sizes, rules, CAUSAL,
        False, PRECISION, WIDTH, D, COLUMNS,
    )  # fmt: skip
    grad_q = add_query_gradient(
        grad_q, q, grad, k_ptr, v_ptr, strides, cut, stop, first, row, lse, delta, row_keys, b, n, sizes, rules, CAUSAL,
        True, PRECISION, WIDTH, D, COLUMNS,
    )  # fmt: skip
    place = first_place(rules.query_starts, b, sizes.queries)
    grad_q_ptr += (place * sizes.heads + n) * WIDTH
    store_rows(
        grad_q_ptr, sizes.heads * WIDTH, grad_q * rules.scale, first, sizes.queries, WIDTH, ROWS, D
    )


@triton.jit
def add_key_gradients(
    sums, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, row_keys_ptr, strides, start, stop, first, column, limit, b, n,
    sizes, rules, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D:
    tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds what the queries [start, stop) of a head contribute to the gradients of a block of keys."""
    grad_k, grad_v = sums
    for i in tl.range(start, stop, ROWS):
        row = i + tl.arange(0, ROWS)[None, :]
        q = load_rows(q_ptr, strides[0][2], i, sizes.queries, WIDTH, ROWS, D)
        grad = load_rows(grad_ptr, strides[3][2], i, sizes.queries, WIDTH, ROWS, D)
        lse = load_lse(lse_ptr, row, row < sizes.queries)
        delta = tl.load(delta_ptr + row, mask=row < sizes.queries, other=0.0)
        if row_keys_ptr is None:
            row_keys = None
        else:
            row_keys = tl.load(row_keys_ptr + row, mask=row < sizes.queries, other=0)
        end = visible_end(row, b, limit, sizes, rules, CAUSAL)
        weights, grad_z = tile_gradient(
            k, q, v, grad, row, column, end, i, first, lse, delta, row_keys, b, n, sizes, rules, CUT, PRECISION, True
        )  # fmt: skip
        grad_v = product(weights.to(grad.dtype), grad, grad_v, PRECISION)
        grad_k = product(grad_z.to(q.dtype), q, grad_k, PRECISION)
    return grad_k, grad_v


@triton.jit
def queries_of_block(
    first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, limit, b, sizes, rules, CAUSAL: tl.constexpr
):
    """Returns the first query that sees one of the keys from `first`, and, with that as its origin,
    the first block of queries from which on every query sees all of them; the number of queries
    where none is seen."""
    start = tl.cast(0, tl.int32)
    whole = tl.cast(0, tl.int32)
    if CAUSAL:
        offset = sizes.queries - sizes.keys
        seen = tl.cast(0, tl.int32)
        if rules.prefix is not None:
            seen = tl.load(rules.prefix + b).to(tl.int32)
        start = tl.where(seen > first, 0, tl.maximum(first + offset, 0) // ROWS * ROWS)
        whole = tl.where(
            seen >= first + COLUMNS,
            0,
            tl.cdiv(tl.maximum(first + COLUMNS - 1 + offset, 0), ROWS) * ROWS,
        )
    start = tl.where(first < limit, start, sizes.queries)
    whole = tl.where(first + COLUMNS <= limit, whole, sizes.queries)
    return start, tl.minimum(tl.maximum(whole, start), tl.cdiv(sizes.queries, ROWS) * ROWS)


@triton.jit
def key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, row_keys_ptr, grad_k_ptr, grad_v_ptr, strides, sizes, rules,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    groups = sizes.heads // sizes.queries_per_kv
    blocks = tl.cdiv(sizes.keys, COLUMNS)
    first = tl.program_id(0) % blocks * COLUMNS
    b = tl.program_id(0) // blocks // groups
    group = tl.program_id(0) // blocks % groups
    sizes = sizes_of_sample(b, sizes, rules)
    column = first + tl.arange(0, COLUMNS)[:, None]
    k = load_rows(
        head_start(k_ptr, strides[1], rules.key_starts, b, group),
        strides[1][2],
        first,
        sizes.keys,
        WIDTH,
        COLUMNS,
        D,
    )
    v = load_rows(
        head_start(v_ptr, strides[2], rules.key_starts, b, group),
        strides[2][2],
        first,
        sizes.keys,
        WIDTH,
        COLUMNS,
        D,
    )
    limit = key_limit(b, sizes, rules)
    start, whole = queries_of_block(first, ROWS, COLUMNS, limit, b, sizes, rules, CAUSAL)
    sums = (tl.zeros([COLUMNS, D], tl.float32), tl.zeros([COLUMNS, D], tl.float32))
    for n in range(group * sizes.queries_per_kv, (group + 1) * sizes.queries_per_kv):
        of_head = statistics_start(b, n, sizes, rules)
        q_head = head_start(q_ptr, strides[0], rules.query_starts, b, n)
        grad_head = head_start(grad_ptr, strides[3], rules.query_starts, b, n)
        keys_head = None if row_keys_ptr is None else row_keys_ptr + of_head
        sums = add_key_gradients(
            sums, k, v, q_head, grad_head, lse_ptr + of_head, delta_ptr + of_head, keys_head, strides, start, whole,
            first, column, limit, b, n, sizes, rules, CAUSAL, True, PRECISION, WIDTH, D, ROWS,
        )  # fmt: skip
        sums = add_key_gradients(
            sums, k, v, q_head, grad_head, lse_ptr + of_head, delta_ptr + of_head, keys_head, strides, whole,
            sizes.queries, first, column, limit, b, n, sizes, rules, CAUSAL, False, PRECISION, WIDTH, D, ROWS,
        )  # fmt: skip
    grad_k, grad_v = sums
    at = (first_place(rules.key_starts, b, sizes.keys) * groups + group) * WIDTH
    stride = groups * WIDTH
    store_rows(grad_k_ptr + at, stride, grad_k * rules.scale, first, sizes.keys, WIDTH, COLUMNS, D)
    store_rows(
        grad_v_ptr + at, stride, grad_v * rules.keep_scale, first, sizes.keys, WIDTH, COLUMNS, D
    )


@triton.jit
def tiles_of_diagonal(offset, b, sizes, rules, CAUSAL: tl.constexpr, T: tl.constexpr):
    """Returns the first tile row of a diagonal of tiles, and the last that holds a visible key,
    plus 1.
    """
    limit = key_limit(b, sizes, rules)
    if CAUSAL:
        seen = tl.cast(0, tl.int32)
        if rules.prefix is not None:
            seen = tl.load(rules.prefix + b).to(tl.int32)
        reached = (
            offset * T < T + sizes.keys - sizes.queries
        )  # the last query of a tile sees its first key
        limit = tl.where(reached, limit, tl.minimum(limit, seen))
    rows = tl.cdiv(sizes.queries, T)
    return tl.maximum(-offset, 0), tl.minimum(rows, tl.cdiv(tl.maximum(limit, 0), T) - offset)


@triton.jit
def fold(tile, T: tl.constexpr):
    """Returns the sums of the diagonals of a tile [T, T], from the lower left corner on, and a 0:
    [2 T].
    """
    row = tl.arange(0, T)[:, None]
    diagonal = tl.arange(0, 2 * T)[None, :]
    column = diagonal + row - (T - 1)
    inside = (column >= 0) & (column < T)
    return tl.sum(
        tl.where(inside, tl.gather(tile, tl.where(inside, column, 0), axis=1), 0.0), axis=0
    )


@triton.jit
def diagonal_tile(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, row_keys_ptr, strides, i, j, b, n, sizes, rules,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Returns the gradient of the scores of the queries from i and the keys from j, [T, T]."""
    row = i + tl.arange(0, T)[:, None]
    column = j + tl.arange(0, T)[None, :]
    q = load_rows(
        head_start(q_ptr, strides[0], rules.query_starts, b, n),
        strides[0][2],
        i,
        sizes.queries,
        WIDTH,
        T,
        D,
    )
    grad = load_rows(
        head_start(grad_ptr, strides[3], rules.query_starts, b, n),
        strides[3][2],
        i,
        sizes.queries,
        WIDTH,
        T,
        D,
    )
    k = load_rows(
        head_start(k_ptr, strides[1], rules.key_starts, b, n // sizes.queries_per_kv),
        strides[1][2],
        j,
        sizes.keys,
        WIDTH,
        T,
        D,
    )
    v = load_rows(
        head_start(v_ptr, strides[2], rules.key_starts, b, n // sizes.queries_per_kv),
        strides[2][2],
        j,
        sizes.keys,
        WIDTH,
        T,
        D,
    )
    at = statistics_start(b, n, sizes, rules) + row
    lse = load_lse(lse_ptr, at, row < sizes.queries)
    delta = tl.load(delta_ptr + at, mask=row < sizes.queries, other=0.0)
    if row_keys_ptr is None:
        row_keys = None
    else:
        row_keys = tl.load(row_keys_ptr + at, mask=row < sizes.queries, other=0)
    end = visible_end(row, b, key_limit(b, sizes, rules), sizes, rules, CAUSAL)
    _, grad_z = tile_gradient(
        q, k, grad, v, row, column, end, i, j, lse, delta, row_keys, b, n, sizes, rules, True, PRECISION, False
    )  # fmt: skip
    return grad_z


@triton.jit
def bias_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, row_keys_ptr, partial_ptr, batch, share, strides, sizes, rules,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums a head's diagonal of tiles over the `share` samples of a part; tiles are square, so
    COLUMNS is ROWS.
    """
    rows = tl.cdiv(sizes.queries, ROWS)
    diagonals = rows + tl.cdiv(sizes.keys, COLUMNS) - 1
    offset = tl.program_id(0) % diagonals - (rows - 1)
    n = tl.program_id(0) // diagonals % sizes.heads
    part = tl.program_id(0) // diagonals // sizes.heads
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for b in range(part * share, tl.minimum((part + 1) * share, batch)):
        own_sizes = sizes_of_sample(b, sizes, rules)
        start, stop = tiles_of_diagonal(offset, b, own_sizes, rules, CAUSAL, ROWS)
        for m in tl.range(start, stop):
            total += diagonal_tile(
                q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, row_keys_ptr, strides, m * ROWS, (m + offset) * ROWS,
                b, n, own_sizes, rules, CAUSAL, PRECISION, WIDTH, D, ROWS,
            )  # fmt: skip
    diagonal = tl.arange(0, 2 * ROWS)
    distance = offset * ROWS + sizes.queries - ROWS + diagonal
    distances = sizes.queries + sizes.keys - 1
    # Neighboring diagonals of tiles have distances in common, so every other one has sums of its
    # own.
    at = (
        (tl.cast(part, tl.int64) * 2 + (offset + rows) % 2) * sizes.heads + n
    ) * distances + distance
    inside = (distance >= 0) & (distance < distances) & (diagonal < 2 * ROWS - 1)
    tl.store(partial_ptr + at, fold(total, ROWS), mask=inside)


# Tiles by the bytes of a head's row, padded to a power of two, and doubled for fp32, whose factors
# are split in two: as many products for a loaded byte as fit into the registers, whatever the
# rules, on sm_80 and sm_90.
LARGE = TileShape(64, 32, 8, 2)
SMALL = TileShape(16, 16, 4, 1)
TILES = {
    "forward": {
        128: TileShape(128, 64, 8, 2),
        256: TileShape(128, 32, 8, 2),
        512: TileShape(32, 32, 4, 1),
        1024: SMALL,
    },
    "query_gradient": {
        128: TileShape(128, 32, 8, 2),
        256: LARGE,
        512: TileShape(32, 32, 8, 1),
        1024: SMALL,
    },
    "key_gradient": {
        128: TileShape(32, 64, 4, 1),
        256: LARGE,
        512: TileShape(32, 32, 8, 1),
        1024: SMALL,
    },
    "bias_gradient": {
        128: TileShape(32, 32, 8, 2),
        256: TileShape(32, 32, 8, 1),
        512: TileShape(16, 16, 8, 1),
        1024: SMALL,
    },
}
# Where they differ on sm_90 and later. With 64 keys or more, products are the instructions of a whole
# group of warps (wgmma); with two stages, queries are copied while others are multiplied. On sm_80
# these tiles would spill.
HOPPER_TILES = {
    "forward": {256: TileShape(128, 64, 8, 2)},
    "query_gradient": {256: TileShape(128, 64, 8, 2)},
    "key_gradient": {128: TileShape(32, 128, 8, 2), 256: TileShape(16, 128, 8, 2)},
}
# The same for fp32, whose rows of 512 bytes are those of heads of 64.
HOPPER_TILES_FP32 = {
    "forward": {512: TileShape(64, 32, 8, 1)},
    "key_gradient": {512: TileShape(32, 32, 8, 2)},
    "bias_gradient": {512: TileShape(16, 16, 8, 2)},
}
# The same for AMD's GPUs, whose warps have 64 lanes: a group of 4 has 512 registers in each.
AMD_TILES = {
    "forward": {128: TileShape(128, 64, 4, 1)},
    "query_gradient": {256: TileShape(64, 32, 4, 1)},
    "key_gradient": {256: TileShape(32, 64, 4, 1), 512: TileShape(32, 32, 4, 1)},
    "bias_gradient": {512: SMALL},
}


def choose_tile(kernel, q: torch.Tensor, *, is_varlen: bool = False) -> TileShape:
    """Returns the tile of a kernel for heads like those of q.

    Where samples begin takes registers, which the large tiles of heads of 128 do not leave.
    """
    return _choose_tile(
        kernel.__name__, q.shape[3], q.itemsize, is_varlen, q.device, _precision(q.device)
    )


@functools.cache
def _choose_tile(
    kernel: str, width: int, itemsize: int, is_varlen: bool, device: torch.device, precision: str
) -> TileShape:
    """Answers `choose_tile` once: to look for the target and to hash a kernel takes microseconds."""
    bytes_of_row = next_power_of_2(width) * itemsize
    size = max(bytes_of_row, 128) if itemsize == 2 else max(2 * bytes_of_row, 512)
    size = min(size, 1024)
    tables = {} if precision == "interpreted" else _special_tiles(itemsize)
    lacks_registers = is_varlen and size == 256 and kernel != "key_gradient"
    if tables is HOPPER_TILES and lacks_registers:
        tables = {}
    return tables.get(kernel, {}).get(size) or TILES[kernel][size]


def _special_tiles(itemsize: int) -> dict[str, dict[int, TileShape]]:
    """Returns where tiles differ from TILES on the GPU that is the current one."""
    target = driver.active.get_current_target()
    if target.backend == "hip":
        return AMD_TILES
    if target.arch >= 90:
        return HOPPER_TILES if itemsize == 2 else HOPPER_TILES_FP32
    return {}


def _describe_call(strided, others, sizes, rules, causal):
    """Returns a `Call` on tensors [B, N, S, D] of any strides, and on others in row-major order."""
    strided = [x if x.stride(3) == 1 else x.contiguous() for x in strided]
    inputs = (*strided, *others)
    strides = tuple([x.stride()[:3] for x in strided])
    # A model has few different scales and rates, so the key of a kernel may depend on their values.
    description = (
        *describe((*inputs, *rules[:TENSOR_RULES])),
        strides,
        sizes,
        rules[TENSOR_RULES:],
    )
    return Call(inputs, strides, sizes, rules, causal, description)


def _launch(kernel, tile, programs, call, inputs, outputs, *numbers):
    """Runs a kernel on inputs of a call, and on outputs in row-major order."""
    width = inputs[0].shape[3]
    constants = {
        "CAUSAL": call.causal,
        "PRECISION": _precision(inputs[0].device),
        "WIDTH": width,
        "D": max(next_power_of_2(width), 16),
        "ROWS": tile.queries,
        "COLUMNS": tile.keys,
    }
    arguments = (*inputs, *outputs, *numbers, call.strides, call.sizes, call.rules)
    description = (call.description, *describe(outputs), *numbers)
    launch(
        kernel, programs, arguments, constants, description, num_warps=tile.warps, num_stages=tile.stages
    )  # fmt: skip


def _precision(device: torch.device) -> str:
    """Returns how fp32 factors are multiplied: to fp32's precision, unless PyTorch's matrix
    products use TF32. AMD's matrix instructions take fp32 as it is.
    """
    if device.type == "cpu":
        return "interpreted"
    if is_for_amd():
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _call(
    q, k, bias, mask, prefix, lengths, keys, scale, causal, dropout, first_head, first_row, softcap
):
    """Returns the sizes and the rules of a call."""
    batch, heads, queries, _ = q.shape
    _, groups, total, _ = k.shape
    strides = None
    if mask is not None:
        strides = mask.expand(batch, heads, queries, total).stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    center = queries - 1
    rules = KernelRules(
        bias, mask, prefix, lengths, keys if dropout else None, None, None, total + center, center, strides, scale,
        softcap or None, 1.0 / (1.0 - dropout), dropout_threshold(dropout), first_head, first_row,
    )  # fmt: skip
    return CallSizes(heads, heads // groups, queries, total), rules


def _call_varlen(q, k, starts, bias, keys, longest, scale, causal, dropout, first_head):
    """Returns the sizes and the rules of a call without padding; q and k are [1, heads, rows, D]."""
    heads = q.shape[1]
    groups = k.shape[1]
    bias, keys = contiguous(bias, keys if dropout else None)
    stride = 0 if bias is None else bias.shape[1]
    rules = KernelRules(
        bias, None, None, None, keys, *starts, stride, longest[0] - 1, None, scale, None,
        1.0 / (1.0 - dropout), dropout_threshold(dropout), first_head, 0,
    )  # fmt: skip
    return CallSizes(heads, heads // groups, *longest), rules


def launch_forward(q, k, v, *arguments):
    *arguments, out, lse = arguments
    sizes, rules = _call(q, k, *arguments)
    _launch_forward(q, k, v, out, lse, q.shape[0], sizes, rules, arguments[6])


def launch_backward(grad, out, lse, q, k, v, *arguments):
    *arguments, grad_q, grad_k, grad_v, grad_bias = arguments
    sizes, rules = _call(q, k, *arguments)
    grads = (grad_q, grad_k, grad_v, grad_bias)
    _launch_backward(grad, out, lse, q, k, v, grads, q.shape[0], sizes, rules, arguments[6])


def launch_varlen_forward(
    q, k, v, query_starts, key_starts, bias, keys, queries, total, scale, causal, dropout, first_head,
    out, lse,
):  # fmt: skip
    q, k, v, out = (x.transpose(0, 1)[None] for x in (q, k, v, out))
    longest = (queries, total)
    starts = (query_starts, key_starts)
    sizes, rules = _call_varlen(
        q, k, starts, bias, keys, longest, scale, causal, dropout, first_head
    )
    _launch_forward(q, k, v, out, lse, len(query_starts) - 1, sizes, rules, causal)


def launch_varlen_backward(
    grad, out, lse, q, k, v, query_starts, key_starts, bias, keys, queries, total, scale, causal, dropout,
    first_head, grad_q, grad_k, grad_v, grad_bias,
):  # fmt: skip
    grad, out, q, k, v = (x.transpose(0, 1)[None] for x in (grad, out, q, k, v))
    longest = (queries, total)
    starts = (query_starts, key_starts)
    sizes, rules = _call_varlen(
        q, k, starts, bias, keys, longest, scale, causal, dropout, first_head
    )
    grads = (grad_q, grad_k, grad_v, grad_bias)
    _launch_backward(grad, out, lse, q, k, v, grads, len(query_starts) - 1, sizes, rules, causal)


def _launch_forward(q, k, v, out, lse, batch, sizes, rules, causal):
    call = _describe_call((q, k, v, out), (), sizes, rules, causal)
    tile = choose_tile(forward, q, is_varlen=rules.query_starts is not None)
    programs = batch * sizes.heads * ceil_div(sizes.queries, tile.queries)
    _launch(forward, tile, programs, call, call.inputs, (lse,))


def _launch_backward(grad, out, lse, q, k, v, grads, batch, sizes, rules, causal):
    grad_q, grad_k, grad_v, grad_bias = grads
    delta = torch.empty_like(lse)
    row_keys = None
    if rules.sample_keys is not None:
        row_keys = lse.new_empty(lse.shape, dtype=torch.int64)
    call = _describe_call((q, k, v, grad, out), (lse, delta, row_keys), sizes, rules, causal)
    tile = choose_tile(query_gradient, q, is_varlen=rules.query_starts is not None)
    programs = batch * sizes.heads * ceil_div(sizes.queries, tile.queries)
    _launch(query_gradient, tile, programs, call, call.inputs, (grad_q,))
    q, k, v, grad, _, *statistics = call.inputs
    inputs = (q, k, v, grad, *statistics)
    tile = choose_tile(key_gradient, q)
    has_both = rules.bias is not None and rules.mask is not None
    if has_both and tile == HOPPER_TILES["key_gradient"][128]:
        tile = tile._replace(queries=16)  # with both, 32 queries need more registers than there are
    programs = batch * k.shape[1] * ceil_div(sizes.keys, tile.keys)
    _launch(key_gradient, tile, programs, call, inputs, (grad_k, grad_v))
    if rules.bias is not None:
        grad_bias.copy_(_bias_gradient(batch, call, inputs))


def _bias_gradient(batch, call, inputs):
    """Returns the gradient of the relative bias in fp32.

    The samples are shared out by their number and size alone.
    """
    sizes = call.sizes
    q = inputs[0]
    tile = choose_tile(bias_gradient, q)
    walks = sizes.heads * (
        ceil_div(sizes.queries, tile.queries) + ceil_div(sizes.keys, tile.keys) - 1
    )
    share = ceil_div(batch, min(batch, ceil_div(PROGRAMS, walks)))
    parts = ceil_div(batch, share)
    distances = sizes.queries + sizes.keys - 1
    partial = q.new_zeros(2 * parts, sizes.heads, distances, dtype=torch.float32)
    _launch(bias_gradient, tile, walks * parts, call, inputs, (partial,), batch, share)
    return partial.sum(0)
