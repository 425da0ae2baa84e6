"""Attention and its gradients in Triton, a tile of scores at a time, in the order of
FlashAttention-2 (Dao 2023).

    forward         a program computes a block of queries, walking over the keys with an online softmax
    query_gradient  the same order: the gradient of q, and what the next kernel needs of a query (delta, dropout's key);
                    with a bias also the sums of each tile's diagonals, over some of the block's rows
    add_bias_sums   adds these over rows, blocks and samples: the gradient of the bias
    key_gradient    a program computes the gradients of a block of keys, walking over the queries

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
from .common import ceil_div, is_kept_by, mixed_key, next_power_of_2, row_key
from .launching import describe, launch

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The sums of diagonals that programs of `query_gradient` leave at a time: so many bytes, or of so many programs.
BYTES_OF_BIAS_SUMS = 1 << 26
LEAST_PROGRAMS = 512
# What a program of `add_bias_sums` adds at a time: so many rows of so many distances.
ROWS_AT_ONCE = 16
DISTANCES_AT_ONCE = 128


class TileShape(NamedTuple):
    """The queries and keys of a tile, the warps of a program, how many tiles are loaded ahead, and the most registers
    of a thread, 0 for as many as there are.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


class CallSizes(NamedTuple):
    """Holds the sizes of the whole call; `queries_per_kv` query heads share a key-value head.

    Samples without padding have lengths of their own, and `queries` and `keys` are the longest.
    """

    heads: int
    queries_per_kv: int
    queries: int
    keys: int


class BiasSums(NamedTuple):
    """Holds the sums over rows of what the bias's gradient consists of, [programs, GROUPS, stride] in fp32, of the
    programs from `first_program` on; without a bias, there are none.
    """

    sums: torch.Tensor | None
    stride: int
    first_program: int


class KernelRules(NamedTuple):
    """What applies to the scores: tensors first, then numbers.

    A rule that does not apply is None, which a kernel knows when it is compiled. `bias_stride` is the
    number of distances of a head's bias, `bias_center` the place of distance 0. `query_starts` and
    `key_starts` say where the samples begin among the rows of tensors without padding, and where the
    last one ends. Nothing here is a tuple of its own: Triton 3.6 loses a 1 in a tuple within another if
    nothing after it is known when the kernel is compiled.
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
    mask_sample_stride: int | None
    mask_head_stride: int | None
    mask_row_stride: int | None
    mask_column_stride: int | None
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
def block_of_head(program, rows, heads, ROWS: tl.constexpr):
    """Returns the first row of a program's block, its sample and its head."""
    blocks = tl.cdiv(rows, ROWS)
    # With the causal rule, the last blocks have the most keys; these programs start first.
    first = (blocks - 1 - program % blocks) * ROWS
    return first, program // blocks // heads, program // blocks % heads


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
def bias_of_block(first_diagonal, n, rules, A: tl.constexpr, B: tl.constexpr):
    """Returns where the diagonals of a block's tiles [A, B] are read, and their distances, for the tile whose own place
    is 0; `first_diagonal` is the first of these distances.

    What does not change from tile to tile is computed here, before the loops. If a compiler moved it out of them, the
    loop's sums would be set on a way around the loop, and every instruction of wgmma would wait for the one before.
    """
    if rules.bias is None:
        block_bias = None
    else:
        LENGTH: tl.constexpr = (
            2 * A if A > B else 2 * B
        )  # a power of 2 that holds A + B - 1 diagonals
        distance = first_diagonal + tl.arange(0, LENGTH)
        head_bias = rules.bias + tl.cast(n, tl.int64) * rules.bias_stride + rules.bias_center
        block_bias = (head_bias + distance, distance)
    return block_bias


@triton.jit
def bias_of_tile(
    block_bias, shift, sizes, A: tl.constexpr, B: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Returns log2(e) times the bias of a tile [A, B] of queries and keys, or of keys and queries with KEYS_FIRST.

    Its distances are those of the block's tile at 0 plus `shift`.

    A tile has as many different numbers as diagonals, so these alone are read, and each element takes its own.
    """
    ROWS: tl.constexpr = B if KEYS_FIRST else A
    at, distance = block_bias
    distance += shift
    inside = (distance > -sizes.queries) & (distance < sizes.keys)
    diagonals = tl.load(at + shift, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    if KEYS_FIRST:
        diagonal = tl.arange(0, A)[:, None] - tl.arange(0, B)[None, :] + (ROWS - 1)
    else:
        diagonal = tl.arange(0, B)[None, :] - tl.arange(0, A)[:, None] + (ROWS - 1)
    return tl.reshape(tl.gather(diagonals, tl.reshape(diagonal, [A * B]), 0), [A, B])


@triton.jit
def apply_rules(scores, row, column, end, block_bias, shift, b, n, sizes, rules, CUT: tl.constexpr):
    """Returns z of a tile from its scores, -inf at hidden keys.

    `row`, `column` and `end`, the number of keys that a query sees, broadcast to the tile, whose bias is `block_bias`
    at `shift`. Without CUT, the queries see all of its keys that the mask allows.
    """
    z = scores
    visible = column < end
    if rules.bias is not None:
        keys_first: tl.constexpr = row.shape[0] == 1
        z += bias_of_tile(block_bias, shift, sizes, scores.shape[0], scores.shape[1], keys_first)
    if rules.mask is not None:
        sample_mask = rules.mask + tl.cast(b, tl.int64) * rules.mask_sample_stride
        head_mask = sample_mask + tl.cast(n, tl.int64) * rules.mask_head_stride
        row = tl.minimum(row, sizes.queries - 1)
        row_mask = head_mask + row.to(tl.int64) * rules.mask_row_stride
        at = row_mask + column * rules.mask_column_stride
        mask = tl.load(at, mask=visible, other=0) if CUT else tl.load(at)
        if rules.mask.dtype.element_ty == tl.uint8:
            z = tl.where(mask != 0, z, float("-inf"))
        else:
            z += mask.to(tl.float32) * LOG2_E
    return tl.where(visible, z, float("-inf")) if CUT else z


@triton.jit
def keys_of_rows(row, b, n, rules):
    """Returns the dropout keys of a head's queries, as `is_kept_by` takes them."""
    head = tl.cast(n, tl.int64) + rules.first_head
    key = row_key(tl.load(rules.sample_keys + b), (head << 32) + rules.first_row + row)
    return mixed_key(key)


@triton.jit
def drop(keep, p, rules):
    """Returns p where it is kept, else 0.

    The 0 is computed: a compiler that knew it would round p first, and select among numbers of 16 bits, which takes
    twice as many instructions.
    """
    return tl.where(keep, p, rules.keep_scale * 0.0)


@triton.jit
def attend(
    state, q, k_ptr, v_ptr, strides, start, stop, block_bias, row, row_keys, b, n, sizes, rules, CAUSAL: tl.constexpr,
    CUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
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
        z = apply_rules(scores, row[:, None], column, end, block_bias, j, b, n, sizes, rules, CUT)
        higher = tl.maximum(top, tl.max(z, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(z - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        if row_keys is not None:
            p = drop(is_kept_by(row_keys[:, None], column, rules.threshold), p, rules)
        v = load_rows(v_ptr, strides[2][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        out = product(p.to(v.dtype), v, out * rescale[:, None], PRECISION)
        top = higher
    return top, total, out


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, strides, sizes, rules, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, b, n = block_of_head(tl.program_id(0), sizes.queries, sizes.heads, ROWS)
    sizes = sizes_of_sample(b, sizes, rules)
    row = first + tl.arange(0, ROWS)
    row_keys = None if rules.sample_keys is None else keys_of_rows(row, b, n, rules)
    block_bias = bias_of_block(1 - ROWS - first, n, rules, ROWS, COLUMNS)
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
        state, q, k_ptr, v_ptr, strides, 0, cut, block_bias, row, row_keys, b, n, sizes, rules, CAUSAL, False,
        PRECISION, WIDTH, D, COLUMNS,
    )  # fmt: skip
    top, total, out = attend(
        state, q, k_ptr, v_ptr, strides, cut, stop, block_bias, row, row_keys, b, n, sizes, rules, CAUSAL, True,
        PRECISION, WIDTH, D, COLUMNS,
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
    left, right, left_grad, right_grad, row, column, end, block_bias, shift, lse, delta, row_keys, b, n, sizes, rules,
    CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns a tile's probabilities, with dropout but for its factor, the gradient of its z but for log2(e), which is
    that of the bias, and the gradient of its products of q and k, but for the scale.

    The products of `left` and `right` (q and k, or k and q) are the scores; those of `left_grad`
    and `right_grad` (the gradient of the output and v, or the reverse), the gradients of the
    probabilities.
    """
    products = product(left, tl.trans(right), None, PRECISION)
    scores = scaled_scores(products, rules)
    z = apply_rules(scores, row, column, end, block_bias, shift, b, n, sizes, rules, CUT)
    p = tl.exp2(z - lse)
    grad = product(left_grad, tl.trans(right_grad), None, PRECISION)
    weights = p
    if row_keys is not None:
        keep = is_kept_by(row_keys, column, rules.threshold)
        weights = drop(keep, p, rules)
        grad_z = p * tl.where(keep, grad * rules.keep_scale - delta, -delta)
    else:
        grad_z = p * (grad - delta)
    grad_products = grad_z
    if rules.softcap is not None:
        grad_products = grad_z * slope_of_cap(scores, rules)
    return weights, grad_z, grad_products


@triton.jit
def load_lse(lse_ptr, at, inside):
    """Returns lse to base 2.

    It is infinite where there is no key or no query, so that all probabilities are 0.
    """
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf")) * LOG2_E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def sum_diagonals(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the sums of a tile's diagonals, a square of COLUMNS rows at a time, of every GROUPS-th row:
    two tensors [squares, GROUPS, COLUMNS], the diagonals from the main one on, and those below it, from the lower left
    corner on, after a 0.

    Each row is rotated by its number, so that a column of a square holds one diagonal from the main one on, and the one
    COLUMNS below it. A warp has all columns of its rows, and no other warp has rows of its group, so nothing but the
    rotation crosses lanes.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    rotated = tl.gather(tile, (column + row) % COLUMNS, axis=1)
    from_main = column + row % COLUMNS < COLUMNS
    shape: tl.constexpr = [ROWS // COLUMNS, COLUMNS // GROUPS, GROUPS, COLUMNS]
    upper = tl.sum(tl.reshape(tl.where(from_main, rotated, 0.0), shape), axis=1)
    lower = tl.sum(tl.reshape(tl.where(from_main, 0.0, rotated), shape), axis=1)
    return upper, lower


@triton.jit
def take(x, index, i):
    """Returns x[i] of x [I, A, B]; `index` counts its first dimension. A thread that has all of it computes nothing."""
    bits = tl.where(index == i, x.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def add_diagonals(
    waiting, tile, sums_ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr
):
    """Adds the diagonals of a tile, stores those that no later tile has, and returns those that wait for one.

    A square shares its diagonals with the squares of the row of squares below it, of the next tile of keys. So the sums
    move down a row of squares from tile to tile.
    """
    SQUARES: tl.constexpr = ROWS // COLUMNS
    tl.static_assert(ROWS % COLUMNS == 0, "a tile for a bias consists of squares below one another")
    upper, lower = sum_diagonals(tile, ROWS, COLUMNS, GROUPS)
    square = tl.arange(0, SQUARES)[:, None, None]
    waiting += lower
    store_sums(sums_ptr, stride, take(waiting, square, SQUARES - 1), COLUMNS, GROUPS)
    moved = tl.zeros([SQUARES, GROUPS, COLUMNS], tl.float32)
    for i in tl.static_range(1, SQUARES):
        moved = tl.where(square == i, take(waiting, square, i - 1)[None, :, :], moved)
    return moved + upper


@triton.jit
def store_sums(sums_ptr, stride, sums, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    at = tl.arange(0, GROUPS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    tl.store(sums_ptr + at, sums)


@triton.jit
def add_query_gradient(
    sums, q, grad, k_ptr, v_ptr, bias_sums_ptr, bias_sums_stride, strides, start, stop, block_bias, row, lse, delta,
    row_keys, b, n, sizes, rules, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Adds what the keys [start, stop) contribute to the gradients of a block of queries, and of the bias."""
    grad_q, waiting = sums
    end = visible_end(row, b, key_limit(b, sizes, rules), sizes, rules, CAUSAL)
    for j in tl.range(start, stop, COLUMNS):
        column = j + tl.arange(0, COLUMNS)[None, :]
        k = load_rows(k_ptr, strides[1][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        v = load_rows(v_ptr, strides[2][2], j, sizes.keys if CUT else None, WIDTH, COLUMNS, D)
        _, grad_z, grad_products = tile_gradient(
            q, k, grad, v, row, column, end, block_bias, j, lse, delta, row_keys, b, n, sizes, rules, CUT, PRECISION
        )  # fmt: skip
        grad_q = product(grad_products.to(k.dtype), k, grad_q, PRECISION)
        if bias_sums_ptr is not None:
            waiting = add_diagonals(
                waiting, grad_z, bias_sums_ptr + j, bias_sums_stride, ROWS, COLUMNS, GROUPS
            )
    return grad_q, waiting


@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, lse_ptr, delta_ptr, row_keys_ptr, grad_q_ptr, bias_sums, strides, sizes,
    rules, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of a block of queries and, with a bias, of each distance from -first - ROWS on the sums
    over GROUPS-th rows, in rows of `bias_sums`.
    """
    program = tl.program_id(0) + bias_sums.first_program
    first, b, n = block_of_head(program, sizes.queries, sizes.heads, ROWS)
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
    block_bias = bias_of_block(1 - ROWS - first, n, rules, ROWS, COLUMNS)
    if bias_sums.sums is None:
        waiting = tl.zeros([1], tl.float32)
        sums_ptr = None
    else:
        waiting = tl.zeros([ROWS // COLUMNS, GROUPS, COLUMNS], tl.float32)
        sums_ptr = bias_sums.sums + tl.program_id(0).to(tl.int64) * GROUPS * bias_sums.stride
    sums = (tl.zeros([ROWS, D], tl.float32), waiting)
    row = row[:, None]
    sums = add_query_gradient(
        sums, q, grad, k_ptr, v_ptr, sums_ptr, bias_sums.stride, strides, 0, cut, block_bias, row, lse, delta, row_keys,
        b, n, sizes, rules, CAUSAL, False, PRECISION, WIDTH, D, ROWS, COLUMNS, GROUPS,
    )  # fmt: skip
    grad_q, waiting = add_query_gradient(
        sums, q, grad, k_ptr, v_ptr, sums_ptr, bias_sums.stride, strides, cut, stop, block_bias, row, lse, delta,
        row_keys, b, n, sizes, rules, CAUSAL, True, PRECISION, WIDTH, D, ROWS, COLUMNS, GROUPS,
    )  # fmt: skip
    if sums_ptr is not None:
        sums_ptr += tl.cdiv(tl.maximum(stop, 0), COLUMNS) * COLUMNS
        square = tl.arange(0, ROWS // COLUMNS)[:, None, None]
        for i in tl.static_range(ROWS // COLUMNS):
            last = take(waiting, square, ROWS // COLUMNS - 1 - i)
            store_sums(sums_ptr + i * COLUMNS, bias_sums.stride, last, COLUMNS, GROUPS)
    place = first_place(rules.query_starts, b, sizes.queries)
    grad_q_ptr += (place * sizes.heads + n) * WIDTH
    store_rows(
        grad_q_ptr, sizes.heads * WIDTH, grad_q * rules.scale, first, sizes.queries, WIDTH, ROWS, D
    )


@triton.jit
def add_key_gradients(
    sums, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, row_keys_ptr, strides, start, stop, block_bias, column, limit, b,
    n, sizes, rules, CAUSAL: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, D:
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
        weights, _, grad_products = tile_gradient(
            k, q, v, grad, row, column, end, block_bias, -i, lse, delta, row_keys, b, n, sizes, rules, CUT, PRECISION
        )  # fmt: skip
        grad_v = product(weights.to(grad.dtype), grad, grad_v, PRECISION)
        grad_k = product(grad_products.to(q.dtype), q, grad_k, PRECISION)
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
        block_bias = bias_of_block(first - (ROWS - 1), n, rules, COLUMNS, ROWS)
        sums = add_key_gradients(
            sums, k, v, q_head, grad_head, lse_ptr + of_head, delta_ptr + of_head, keys_head, strides, start, whole,
            block_bias, column, limit, b, n, sizes, rules, CAUSAL, True, PRECISION, WIDTH, D, ROWS,
        )  # fmt: skip
        sums = add_key_gradients(
            sums, k, v, q_head, grad_head, lse_ptr + of_head, delta_ptr + of_head, keys_head, strides, whole,
            sizes.queries, block_bias, column, limit, b, n, sizes, rules, CAUSAL, False, PRECISION, WIDTH, D, ROWS,
        )  # fmt: skip
    grad_k, grad_v = sums
    at = (first_place(rules.key_starts, b, sizes.keys) * groups + group) * WIDTH
    stride = groups * WIDTH
    store_rows(grad_k_ptr + at, stride, grad_k * rules.scale, first, sizes.keys, WIDTH, COLUMNS, D)
    store_rows(
        grad_v_ptr + at, stride, grad_v * rules.keep_scale, first, sizes.keys, WIDTH, COLUMNS, D
    )


@triton.jit
def add_bias_sums(
    grad_ptr, bias_sums, programs, batch, sizes, ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds the sums that `programs` programs of `query_gradient` have left to the gradient of the bias [heads,
    distances], AT_ONCE rows at a time, in an order that depends on the lengths of the sequences alone.
    """
    distances = sizes.queries + sizes.keys - 1
    n = tl.program_id(0) % sizes.heads
    place = tl.program_id(0) // sizes.heads * BLOCK + tl.arange(0, BLOCK)
    grad_at = grad_ptr + tl.cast(n, tl.int64) * distances + place
    grad = tl.load(grad_at, mask=place < distances, other=0.0)
    blocks = tl.cdiv(sizes.queries, ROWS)
    for b in range(batch):
        first_program = (b * sizes.heads + n) * blocks - bias_sums.first_program
        for start in range(0, blocks * GROUPS, AT_ONCE):
            row = start + tl.arange(0, AT_ONCE)[:, None]
            block = row // GROUPS
            program = first_program + block
            # A block of queries that begins at `first` has the distances from -first - ROWS on.
            at = place[None, :] - (sizes.queries - 1) + (blocks - block) * ROWS
            inside = (block < blocks) & (program >= 0) & (program < programs)
            inside &= (at >= 0) & (at < bias_sums.stride)
            at += (program * GROUPS + row % GROUPS).to(tl.int64) * bias_sums.stride
            grad += tl.sum(tl.load(bias_sums.sums + at, mask=inside, other=0.0), axis=0)
    tl.store(grad_at, grad, mask=place < distances)


# Tiles by the bytes of a head's row, padded to a power of two, and doubled for fp32, whose factors
# are split in two: as many products for a loaded byte as fit into the registers, whatever the
# rules, on sm_80 and sm_90. The gradient of q has other tiles with a bias where the sums of the
# bias's own gradient take registers; a warp rotates a row of up to 32 keys in one step.
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
    "query_gradient with bias": {256: TileShape(32, 32, 4, 1)},
    "key_gradient": {
        128: TileShape(32, 64, 4, 1),
        256: LARGE,
        512: TileShape(32, 32, 8, 1),
        1024: SMALL,
    },
}
# Where they differ on sm_90 and later. With 64 keys or more, products are the instructions of a whole
# group of warps (wgmma); with two stages, queries are copied while others are multiplied. On sm_80
# these tiles would spill. With 128 registers a multiprocessor has two programs, so that one computes
# exponentials and hashes while the other waits; without a limit, dropout takes more.
HOPPER_TILES = {
    "forward": {128: TileShape(128, 64, 8, 2, 128), 256: TileShape(128, 64, 8, 2)},
    "query_gradient": {256: TileShape(128, 64, 8, 2)},
    "query_gradient with bias": {256: TileShape(128, 32, 8, 2)},
    "key_gradient": {128: TileShape(32, 128, 8, 2), 256: TileShape(16, 128, 8, 2)},
}
# The same for fp32, whose rows of 512 bytes are those of heads of 64.
HOPPER_TILES_FP32 = {
    "forward": {512: TileShape(64, 32, 8, 1)},
    "query_gradient with bias": {512: SMALL},
    "key_gradient": {512: TileShape(32, 32, 8, 2)},
}
# The same for AMD's GPUs, whose warps have 64 lanes: a group of 4 has 512 registers in each.
AMD_TILES = {
    "forward": {128: TileShape(64, 64, 4, 1)},
    "query_gradient": {256: TileShape(64, 32, 4, 1), 512: SMALL},
    "key_gradient": {256: TileShape(32, 32, 4, 1), 512: TileShape(32, 32, 4, 1)},
}


def choose_tile(kernel, q: torch.Tensor, rules: KernelRules) -> TileShape:
    """Returns the tile of a kernel for heads like those of q.

    A limit of registers holds for calls without a mask.
    """
    tile = _choose_tile(
        kernel.__name__, q.shape[3], q.itemsize, rules.query_starts is not None, rules.bias is not None, q.device,
        _precision(q.device),
    )  # fmt: skip
    if tile.registers and rules.mask is not None:
        tile = tile._replace(registers=0)
    return tile


@functools.cache
def _choose_tile(
    kernel: str, width: int, itemsize: int, is_varlen: bool, has_bias: bool, device: torch.device, precision: str
) -> TileShape:  # fmt: skip
    """Answers `choose_tile` once: to look for the target and to hash a kernel takes microseconds."""
    bytes_of_row = next_power_of_2(width) * itemsize
    size = max(bytes_of_row, 128) if itemsize == 2 else max(2 * bytes_of_row, 512)
    size = min(size, 1024)
    tables = {} if precision == "interpreted" else _special_tiles(itemsize)
    with_bias = f"{kernel} with bias" if has_bias else ""
    # Where samples begin takes registers, which the large tiles do not leave.
    if tables is HOPPER_TILES and is_varlen and size == 256 and kernel != "key_gradient":
        tables = {name: tiles for name, tiles in tables.items() if name == with_bias}
    for table in (tables, TILES):
        tile = table.get(with_bias, {}).get(size) or table.get(kernel, {}).get(size)
        if tile is not None:
            return tile
    raise AssertionError(f"{kernel} has no tile for rows of {size} bytes")


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


def _launch(kernel, tile, programs, call, inputs, outputs, bias_sums=None, **constants):
    """Runs a kernel on inputs of a call, and on outputs in row-major order."""
    width = inputs[0].shape[3]
    constants = {
        "CAUSAL": call.causal,
        "PRECISION": _precision(inputs[0].device),
        "WIDTH": width,
        "D": max(next_power_of_2(width), 16),
        "ROWS": tile.queries,
        "COLUMNS": tile.keys,
        **constants,
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        options["maxnreg"] = tile.registers
    extra = () if bias_sums is None else (bias_sums,)
    arguments = (*inputs, *outputs, *extra, call.strides, call.sizes, call.rules)
    description = (call.description, *describe((*outputs, *extra)))
    launch(kernel, programs, arguments, constants, description, **options)


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
    strides: tuple[int | None, ...] = (None,) * 4
    if mask is not None:
        strides = mask.expand(batch, heads, queries, total).stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    center = queries - 1
    rules = KernelRules(
        bias, mask, prefix, lengths, keys if dropout else None, None, None, total + center, center, *strides, scale,
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
        bias, None, None, None, keys, *starts, stride, longest[0] - 1, None, None, None, None, scale, None,
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
    tile = choose_tile(forward, q, rules)
    programs = batch * sizes.heads * ceil_div(sizes.queries, tile.queries)
    _launch(forward, tile, programs, call, call.inputs, (lse,))


def _launch_backward(grad, out, lse, q, k, v, grads, batch, sizes, rules, causal):
    grad_q, grad_k, grad_v, grad_bias = grads
    delta = torch.empty_like(lse)
    row_keys = None
    if rules.sample_keys is not None:
        row_keys = lse.new_empty(lse.shape, dtype=torch.int64)
    call = _describe_call((q, k, v, grad, out), (lse, delta, row_keys), sizes, rules, causal)
    _launch_query_gradient(call, grad_q, grad_bias, batch)
    q, k, v, grad, _, *statistics = call.inputs
    inputs = (q, k, v, grad, *statistics)
    tile = choose_tile(key_gradient, q, rules)
    has_both = rules.bias is not None and rules.mask is not None
    if has_both and tile == HOPPER_TILES["key_gradient"][128]:
        tile = tile._replace(queries=16)  # with both, 32 queries need more registers than there are
    programs = batch * k.shape[1] * ceil_div(sizes.keys, tile.keys)
    _launch(key_gradient, tile, programs, call, inputs, (grad_k, grad_v))


def _launch_query_gradient(call, grad_q, grad_bias, batch):
    """Computes the gradient of q, and that of the bias by some programs after others, so that their sums need little
    memory.
    """
    sizes = call.sizes
    rules = call.rules
    tile = choose_tile(query_gradient, call.inputs[0], rules)
    blocks = ceil_div(sizes.queries, tile.queries)
    programs = batch * sizes.heads * blocks
    groups = min(tile.keys, tile.warps * 32 // tile.keys)

    def compute(part, bias_sums):
        _launch(
            query_gradient, tile, len(part), call, call.inputs, (grad_q,), bias_sums, GROUPS=groups
        )

    if rules.bias is None:
        compute(range(programs), BiasSums(None, 0, 0))
        return
    distances = sizes.queries + sizes.keys - 1
    total = torch.zeros(sizes.heads, distances, dtype=torch.float32, device=grad_q.device)
    length = ceil_div(sizes.keys, tile.keys) * tile.keys + tile.queries
    constants = {
        "ROWS": tile.queries,
        "GROUPS": groups,
        "BLOCK": DISTANCES_AT_ONCE,
        "AT_ONCE": ROWS_AT_ONCE,
    }
    adders = sizes.heads * ceil_div(distances, DISTANCES_AT_ONCE)
    # A block of queries that does not see all keys stores only the sums of those that it sees.
    sees_all = not call.causal and rules.lengths is None and rules.query_starts is None
    allocate = total.new_empty if sees_all else total.new_zeros
    for part in split_programs(programs, blocks, 4 * groups * length):
        bias_sums = BiasSums(allocate(len(part), groups, length), length, part.start)
        compute(part, bias_sums)
        arguments = (total, bias_sums, len(part), batch, sizes)
        launch(add_bias_sums, adders, arguments, constants, num_warps=4)
    grad_bias.copy_(total)


def split_programs(programs: int, blocks: int, size: int) -> list[range]:
    """Returns the programs of `query_gradient` in parts, whose sums for the bias exist at a time.

    A part is a whole number of heads of a sample, or of ROWS_AT_ONCE blocks of one. Then the order of all sums depends
    on the lengths of the sequences alone, but not on how many heads a rank has.

    Args:
        programs: One for each block of queries, head and sample.
        blocks: The blocks of queries of a head of a sample.
        size: The bytes of a program's sums.
    """
    at_once = max(BYTES_OF_BIAS_SUMS // size, LEAST_PROGRAMS)
    if at_once >= blocks:
        step = at_once // blocks * blocks
        return [range(i, min(i + step, programs)) for i in range(0, programs, step)]
    step = at_once // ROWS_AT_ONCE * ROWS_AT_ONCE
    parts = []
    for first in range(0, programs, blocks):
        end = first + blocks
        parts += [range(i, min(i + step, end)) for i in range(first, end, step)]
    return parts
