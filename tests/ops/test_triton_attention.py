"""The Triton kernels of attention in the interpreter against PyTorch's operators in fp64, and broken kernels.

Each case has several tiles, parts of tiles and outputs that begin as NaN, and compares the output, the log of the sums
and all gradients. `make test` visits a share of the table.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from attention_oracle import BOUNDS, attend_in_fp64, load_mutant
from every_case import by_turns, every_day

from shardzoo import ops
from shardzoo.ops.registration import OPS

kernels = pytest.importorskip("shardzoo.ops.triton_kernels.attention")

SCALE = 0.3
BATCH = 2
FIRST_HEAD = 3
FIRST_ROW = 5
SOFTCAP = 1.5  # of scores with a deviation of about 0.3 · 8 ** 0.5, so that some are beyond it


class Case(NamedTuple):
    """What a case is about: its rules by name, sizes of the heads and the sequence, and the tile."""

    rules: tuple[str, ...]
    width: int
    lengths: tuple[int, int]
    queries_per_kv: int
    dtype: torch.dtype
    tile: tuple[int, int]

    def __str__(self):
        sizes = f"{self.lengths[0]}x{self.lengths[1]}x{self.width}"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{'+'.join(self.rules) or 'plain'}-{sizes}-{self.queries_per_kv}-{kind}"


RULES = [
    (), ("causal",), ("mask",), ("added",), ("causal", "prefix"), ("lengths",), ("bias",), ("dropout",),
    ("causal", "bias", "dropout"), ("causal", "prefix", "lengths", "mask", "bias", "dropout"),
]  # fmt: skip
WIDTHS = (64, 80, 128, 256)
LENGTHS = [(1, 1), (33, 33), (17, 34), (34, 17), (1, 40), (32, 16), (16, 16)]


def list_cases():
    """Returns all combinations of rules, widths and lengths; types, tiles and groups take turns."""
    dtypes = itertools.cycle(
        [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float32]
    )
    tiles = itertools.cycle([(16, 32), (32, 16), (16, 16)])
    groups = itertools.cycle([1, 2, 1, 3, 1, 2, 1])
    shapes = itertools.product(RULES, WIDTHS, LENGTHS)
    cases = [
        Case(rules, width, lengths, next(groups), next(dtypes), next(tiles))
        for rules, width, lengths in shapes
    ]
    # Two rules alone, at the lengths of several tiles, in each type.
    pairs = itertools.combinations(("mask", "lengths", "bias", "dropout"), 2)
    cases += [
        Case(pair, 64, lengths, next(groups), dtype, next(tiles))
        for pair in pairs
        for lengths in ((34, 33), (33, 34))
        for dtype in BOUNDS
    ]
    extra = [
        ("causal", "lengths"),
        ("causal", "added"),
        ("causal", "prefix", "bias"),
        ("causal", "dropout"),
        ("cap",),
        ("cap", "causal", "dropout"),
        ("cap", "causal", "prefix", "lengths", "mask", "bias", "dropout"),
    ]
    cases += [
        Case(rules, 80, lengths, next(groups), torch.float32, next(tiles))
        for rules in extra
        for lengths in ((20, 40), (40, 20), (2, 35))
    ]
    return cases


CASES = list_cases()


def make_problem(case):
    """Returns the tensors that get gradients, that of the output, and the other arguments of the operator."""
    generator = torch.Generator().manual_seed(CASES.index(case) if case in CASES else 0)
    queries, keys = case.lengths
    groups = 2 if case.queries_per_kv == 1 or queries * keys < 300 else 1
    heads = groups * case.queries_per_kv

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Widths and dropout make values large; then gradients of weights would be, and differences round.
    dropout = 0.3 if "dropout" in case.rules else 0.0
    q = normal(BATCH, heads, queries, case.width) * (8 / case.width) ** 0.5
    k = normal(BATCH, groups, keys, case.width)
    v = normal(BATCH, groups, keys, case.width) * (1 - dropout) / case.width**0.5
    bias = normal(heads, queries + keys - 1) if "bias" in case.rules else None
    grad = normal(BATCH, heads, queries, case.width)
    mask = None
    if "mask" in case.rules:
        mask = normal(BATCH, 1, queries, keys) > -0.5
        mask[0, :, queries // 2] = False  # a query that sees nothing
    elif "added" in case.rules:
        mask = normal(1, heads, 1, keys).to(case.dtype)
    prefix = torch.tensor([0, min(20, keys)]) if "prefix" in case.rules else None
    lengths = torch.tensor([keys, keys // 2]) if "lengths" in case.rules else None
    sample_keys = ops.dropout_keys(77, 4, BATCH) if dropout else None
    tensors = [None if x is None else x.to(case.dtype) for x in (q, k, v, bias)]
    rules = (
        mask, prefix, lengths, sample_keys, SCALE, "causal" in case.rules, dropout, FIRST_HEAD,
        FIRST_ROW, SOFTCAP if "cap" in case.rules else 0.0,
    )  # fmt: skip
    return tensors, grad.to(case.dtype), rules


def compute_by(module, tensors, grad, rules):
    """Returns what a module's kernels compute: the output, the gradients and the log of the sums."""
    outputs = [x.fill_(math.nan) for x in OPS["attention"].allocate(*tensors, *rules)]
    module.launch_forward(*tensors, *rules, *outputs)
    arguments = (grad, *outputs, *tensors, *rules)
    grads = [x.fill_(math.nan) for x in OPS["attention_backward"].allocate(*arguments)]
    module.launch_backward(*arguments, *grads)
    return [outputs[0], *grads[: 4 if tensors[3] is not None else 3], outputs[1]]


def compute_expected(tensors, grad, rules):
    leaves = [None if x is None else x.double().requires_grad_() for x in tensors]
    out, lse = attend_in_fp64(leaves, rules)
    given = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, given, grad.double()), lse.detach()]


def find_errors(module, case):
    """Returns each result's largest error as a share of its largest value; infinite where only one is finite."""
    problem = make_problem(case)
    tile = case.tile

    def choose_tile(kernel, q, rules):
        if kernel is module.query_gradient and rules.bias is not None:
            return module.TileShape(max(tile), min(tile), 2, 1)  # squares below one another
        return module.TileShape(*tile, 4, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose_tile", choose_tile)
        patch.setattr(module, "BYTES_OF_BIAS_SUMS", 0)
        patch.setattr(module, "LEAST_PROGRAMS", 4)
        patch.setattr(module, "ROWS_AT_ONCE", 4)
        results = compute_by(module, *problem)
    errors = []
    for value, wanted in zip(results, compute_expected(*problem), strict=True):
        finite = wanted.isfinite()
        if not torch.equal(value[~finite].double(), wanted[~finite]):
            errors.append(math.inf)
            continue
        difference = (value.double() - wanted)[finite].abs()
        largest = max(1.0, wanted[finite].abs().max().item() if finite.any() else 0.0)
        worst = difference.max().item() / largest if finite.any() else 0.0
        errors.append(math.inf if math.isnan(worst) else worst)
    return errors


def test_the_table_has_enough_cases():
    assert len(CASES) == len(set(CASES)) >= 300


@pytest.mark.parametrize("case", by_turns(CASES, 164), ids=str)
def test_triton_computes_what_fp64_does(case):
    assert max(find_errors(kernels, case)) <= BOUNDS[case.dtype]


PLAIN = Case((), 64, (33, 40), 1, torch.float32, (16, 16))
CAUSAL = PLAIN._replace(rules=("causal",))
BIASED = PLAIN._replace(rules=("bias",))
CAPPED = PLAIN._replace(rules=("cap",))
SQUARES = BIASED._replace(tile=(32, 16))
PARTED = BIASED._replace(lengths=(40, 20))
# name: (text of the kernels, what replaces it, a case that reaches it)
MUTANTS = {
    "sums keep an old maximum": ("total * rescale + tl.sum", "total + tl.sum", PLAIN),
    "outputs keep an old maximum": ("out * rescale[:, None], PRECISION", "out, PRECISION", PLAIN),
    "the diagonal begins at the first key": ("(sizes.keys - sizes.queries + 1)", "1", CAUSAL),
    "a prefix is hidden": (
        "tl.maximum(diagonal, tl.load(rules.prefix + b))", "(diagonal + 0)",
        CAUSAL._replace(rules=("causal", "prefix")),
    ),
    "a tile of keys is taken for whole": ("0) // COLUMNS * COLUMNS", "0) // COLUMNS * COLUMNS + COLUMNS", CAUSAL),
    "a tile of queries is taken for whole": (
        "tl.cdiv(tl.maximum(first + COLUMNS - 1 + offset, 0), ROWS) * ROWS",
        "tl.maximum(first + offset, 0) // ROWS * ROWS", CAUSAL,
    ),
    "the first queries of a block of keys are left out": (
        "tl.maximum(first + offset, 0) // ROWS * ROWS)", "tl.maximum(first + offset + ROWS, 0) // ROWS * ROWS)",
        CAUSAL,
    ),
    "lengths are ignored": (
        "tl.minimum(tl.load(rules.lengths + b), sizes.keys)", "tl.minimum(sizes.keys, sizes.keys)",
        PLAIN._replace(rules=("lengths",)),
    ),
    "a bias by the wrong sign of the distance": (
        "(head_bias + distance, distance)", "(head_bias - distance, distance)",
        PLAIN._replace(rules=("bias",), lengths=(33, 33)),
    ),
    "a bias beside its place": (
        "first_diagonal + tl.arange(0, LENGTH)", "first_diagonal + 1 + tl.arange(0, LENGTH)", BIASED,
    ),
    "a tile's bias ends too early": ("(distance < sizes.keys)", "(distance < sizes.keys - 1)", BIASED),
    "a tile's bias begins too late": (
        "(distance > -sizes.queries)", "(distance > 1 - sizes.queries)", BIASED,
    ),
    "a bias of queries for keys": (
        "tl.arange(0, A)[:, None] - tl.arange(0, B)[None, :]", "tl.arange(0, B)[None, :] - tl.arange(0, A)[:, None]",
        BIASED,
    ),
    "a bias of another tile of queries": (
        "block_bias, -i, lse", "block_bias, i, lse", BIASED,
    ),
    "the cap has no slope": ("grad_z * slope_of_cap(scores, rules)", "grad_z * 1.0", CAPPED),
    "the slope of the cap is that of the bias, too": (
        "waiting, grad_z, bias_sums_ptr + j", "waiting, grad_products, bias_sums_ptr + j",
        PLAIN._replace(rules=("cap", "bias")),
    ),
    "a cap before the scale": ("(rules.scale / rules.softcap)", "(1.0 / rules.softcap)", CAPPED),
    "a series that ends early": ("series * square - 1.0 / 3.0", "-1.0 / 3.0", CAPPED),
    "a cap that is too low": (
        "* (rules.softcap * LOG2_E)\n    return scores", "* rules.softcap\n    return scores", CAPPED,
    ),
    "a row is rotated too little": ("(column + row) % COLUMNS, axis", "(column + row // 2) % COLUMNS, axis", SQUARES),
    "diagonals of two tiles are mixed up": (
        "column + row % COLUMNS < COLUMNS", "column + row % COLUMNS <= COLUMNS", SQUARES,
    ),
    "squares below one another share diagonals": ("take(waiting, square, i - 1)", "take(waiting, square, i)", SQUARES),
    "the last diagonals are stored beside their place": ("sums_ptr + i * COLUMNS", "sums_ptr + i", SQUARES),
    "a program reads the sums of the block above": ("(blocks - block) * ROWS", "(blocks - block - 1) * ROWS", BIASED),
    "one group of rows is added": ("row % GROUPS).to", "0).to", SQUARES),
    "the first programs count again": ("length), length, part.start)", "length), length, 0)", PARTED),
    "the hash of a row goes without its step": (
        "return mixed_key(key)", "return key", PLAIN._replace(rules=("dropout",)),
    ),
    "the scale is left out of a gradient": ("grad_q * rules.scale", "grad_q", PLAIN),
    "delta is left out": ("p * (grad - delta)", "p * grad", PLAIN),
    "gradients of dropped weights": (
        "tl.where(keep, grad * rules.keep_scale - delta, -delta)", "grad * rules.keep_scale - delta",
        PLAIN._replace(rules=("dropout",)),
    ),
    "masks of other positions": (
        "(head << 32) + rules.first_row + row", "(head << 32) + row", PLAIN._replace(rules=("dropout",)),
    ),
    "only one head of a group": (
        "range(group * sizes.queries_per_kv, (group + 1) * sizes.queries_per_kv)",
        "range(group * sizes.queries_per_kv, group * sizes.queries_per_kv + 1)", PLAIN._replace(queries_per_kv=2),
    ),
    "rows without keys divide by zero": (
        "tl.where(higher == float(\"-inf\"), 0.0, higher)", "higher", PLAIN._replace(rules=("mask",)),
    ),
    "a mask of the first query for all": (
        "row.to(tl.int64) * rules.mask_row_stride", "row.to(tl.int64) * 0", PLAIN._replace(rules=("mask",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(MUTANTS, 18))
def test_a_broken_kernel_is_caught(name, tmp_path):
    text, replacement, case = MUTANTS[name]
    assert max(find_errors(kernels, case)) <= BOUNDS[case.dtype]
    assert (
        max(find_errors(load_mutant(kernels, tmp_path, text, replacement), case))
        > BOUNDS[case.dtype]
    )


def test_the_gradient_of_a_bias_depends_on_no_split():
    """Bit for bit: on how many programs leave their sums at a time, and on the heads that a rank has."""
    case = PLAIN._replace(rules=("bias", "dropout"), width=16, lengths=(80, 16))
    tensors, grad, rules = make_problem(case)
    q, k, v, bias = tensors
    assert bias is not None

    def compute(programs, heads=slice(None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "choose_tile", lambda *_: kernels.TileShape(16, 16, 4, 1))
            patch.setattr(kernels, "ROWS_AT_ONCE", 4)
            patch.setattr(kernels, "BYTES_OF_BIAS_SUMS", 0)
            patch.setattr(kernels, "LEAST_PROGRAMS", programs)
            part = [q[:, heads], k[:, heads], v[:, heads], bias[heads]]
            return compute_by(kernels, part, grad[:, heads], rules)

    whole = compute(1000)
    # Less than the 5 blocks of a head, and two heads.
    for programs in every_day([4], more=[13]):
        for value, wanted in zip(compute(programs), whole, strict=True):
            assert torch.equal(value, wanted)
    first_head = compute(4, slice(0, 1))
    assert torch.equal(first_head[4], whole[4][:1])
