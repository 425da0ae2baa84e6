"""Attention in linear memory against written-out attention in fp64."""

import importlib
import math
import os
import subprocess
import sys

import pytest
import torch
from every_case import EVERY_CASE, every_day, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo import ops
from shardzoo.ops.attention import BYTES_AT_ONCE, attention
from shardzoo.ops.registration import OPS

SCALE = 0.3
BOUND = {
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}  # of the largest value

KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def written_out(
    q,
    k,
    v,
    *,
    relative_bias,
    mask,
    causal,
    prefix,
    key_lengths,
    dropout,
    keys,
    first_head,
    first_row,
    softcap=None,
):
    """Returns softmax(SCALE * q·kᵀ + bias)·v and the log of the sums, with one Python decision per element."""
    batch, heads, queries, _ = q.shape
    total, served = k.shape[2], heads // k.shape[1]
    k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
    distance = torch.arange(total) - torch.arange(queries)[:, None] + queries - 1
    z = SCALE * torch.einsum("bnid,bnjd->bnij", q, k)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z if relative_bias is None else z + relative_bias[:, distance]
    z = z if mask is None or mask.dtype == torch.bool else z + mask
    seen = torch.zeros(z.shape, dtype=torch.bool)
    for b in range(batch):
        for i in range(queries):
            for j in range(total):
                by_rule = (
                    not causal or j <= i + total - queries or (prefix is not None and j < prefix[b])
                )
                seen[b, :, i, j] = by_rule and (key_lengths is None or j < key_lengths[b])
    seen = seen & mask if mask is not None and mask.dtype == torch.bool else seen
    z = z.masked_fill(~seen, -math.inf)
    probs = z.softmax(-1).nan_to_num(0.0)  # rows without a key are NaN before
    if dropout:
        probs = probs * kept(keys, probs.shape, dropout, first_head, first_row) / (1 - dropout)
    return probs @ v, z.logsumexp(-1)


def kept(keys, shape, dropout, first_head, first_row):
    """Returns the dropout mask that `masked_softmax` applies, [B, N, Sq, Sk]."""
    batch, heads, queries, columns = shape
    whole = torch.zeros(batch, heads, first_row + queries, columns)
    dropped = ops.masked_softmax(whole, dropout=dropout, keys=keys, first_head=first_head)
    return dropped[:, :, first_row:] != 0


@st.composite
def problems(draw, most_queries=9, most_keys=11, sizes=(8, 24, 64), caps=(None,)):
    served, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    batch, queries, total = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, most_queries)),
        draw(st.integers(1, most_keys)),
    )
    size = draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(batch, served * pairs, queries, size)
    k, v = normal(batch, pairs, total, size), normal(batch, pairs, total, size)
    rules = dict.fromkeys(("relative_bias", "mask", "prefix", "key_lengths", "keys"))
    rules |= {"causal": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.1, 0.9]))}
    rules |= {
        "first_head": draw(st.sampled_from([0, 5])),
        "first_row": draw(st.sampled_from([0, 3])),
    }
    if rules["dropout"]:
        rules["keys"] = ops.dropout_keys(77, 4, batch)
    if draw(st.booleans()):
        rules["relative_bias"] = normal(q.shape[1], queries + total - 1)
    if rules["causal"] and draw(st.booleans()):
        rules["prefix"] = torch.randint(total + 2, (batch,), generator=generator)
    if draw(st.booleans()):
        rules["key_lengths"] = torch.randint(total + 1, (batch,), generator=generator)
    kind = draw(st.sampled_from(["none", "bool", "added"]))
    if kind != "none":
        mask = normal(batch, 1, draw(st.sampled_from([1, queries])), total)
        rules["mask"] = mask > -0.5 if kind == "bool" else mask
    if cap := draw(st.sampled_from(caps)):
        rules["softcap"] = cap
    return q, k, v, rules


def gradients(function, tensors, grad):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


def rounded(q, k, v, rules, dtype):
    """Returns the tensors that get gradients, that of the output, and the other rules, in `dtype`."""
    others = {name: value for name, value in rules.items() if name != "relative_bias"}
    if others["mask"] is not None and others["mask"].is_floating_point():
        others["mask"] = others["mask"].to(dtype)
    grad = torch.linspace(-1, 1, q.numel(), dtype=torch.float64)
    # In another order, because long sums of one sign that cancel in the end round much more than their result.
    grad = grad[torch.randperm(q.numel(), generator=torch.Generator().manual_seed(0))].reshape(
        q.shape
    )
    return [
        None if t is None else t.to(dtype) for t in (q, k, v, rules["relative_bias"], grad)
    ], others


def results(problem, dtype):
    """Returns the output, the gradients and lse, in this order."""
    (*tensors, grad), others = rounded(*problem, dtype)
    out, grads = gradients(
        lambda q, k, v, b=None: attention(q, k, v, scale=SCALE, relative_bias=b, **others),
        tensors,
        grad,
    )
    mask, *rest = (others[name] for name in ("mask", "prefix", "key_lengths", "keys"))
    settings = [others[name] for name in ("causal", "dropout", "first_head", "first_row")]
    settings.append(others.get("softcap") or 0.0)
    return out, *grads, torch.ops.shardzoo.attention(*tensors, mask, *rest, SCALE, *settings)[1]


def results_written_out(problem, dtype, rounding):
    """The same from the definition, computed in `dtype` from tensors that are rounded to `rounding`."""
    q, k, v, rules = problem
    (q, k, v, bias, grad), others = rounded(q, k, v, rules, rounding)
    (*tensors, grad), others = rounded(q, k, v, {**others, "relative_bias": bias}, dtype)
    out, grads = gradients(
        lambda q, k, v, b=None: written_out(q, k, v, relative_bias=b, **others)[0], tensors, grad
    )
    return out, *grads, written_out(*tensors[:3], relative_bias=tensors[3], **others)[1]


def error(value, expected):
    """Returns the largest error as a share of the largest value, or of 1; infinities must be equal."""
    finite = expected.isfinite()
    assert torch.equal(value[~finite].double(), expected[~finite])
    expected = expected.masked_fill(~finite, 0.0)
    return (
        value.double().masked_fill(~finite, 0.0) - expected
    ).abs().max() / expected.abs().max().clamp(min=1.0)


@settings(max_examples=examples(80), deadline=None)
@given(
    problem=problems(caps=(None, 0.7)),
    dtype=st.sampled_from(list(BOUND)),
    rows=st.sampled_from([2, 5, 128]),
    variant=st.sampled_from(["reference", "auto"]),
)
def test_attention_is_written_out_attention(problem, dtype, rows, variant):
    problem = with_short_values(*problem)
    with pytest.MonkeyPatch.context() as patch, ops.kernels(variant):
        in_blocks(patch, rows)
        expected = results_written_out(problem, torch.float64, dtype)
        *values, lse = results(problem, dtype)
        assert all(value.dtype == dtype for value in values)
        assert all(
            error(value, wanted) <= BOUND[dtype]
            for value, wanted in zip((*values, lse), expected, strict=True)
        )


@pytest.mark.before_release
@settings(
    max_examples=80 if EVERY_CASE else 6, deadline=None
)  # of about 0.7 s each, in Triton's interpreter
@given(
    problem=problems(40, 40, sizes=(8, 24, 64, 128), caps=(None, 0.7))
    if EVERY_CASE
    else problems(20, 34, sizes=(8, 24), caps=(None, 0.7)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    tile=st.sampled_from([(16, 32), (32, 16)]),
)
def test_triton_is_written_out_attention(problem, dtype, tile):
    """fp32 as exactly as other variants, 16-bit types against the errors of PyTorch's operators in the same type."""
    problem = with_short_values(*problem)
    with pytest.MonkeyPatch.context() as patch, ops.kernels("triton"):
        in_tiles(patch, *tile)
        values = results(problem, dtype)
    expected = results_written_out(problem, torch.float64, dtype)
    slack = (
        4.0 if dtype == torch.bfloat16 else 1.0
    )  # Triton's interpreter truncates to bf16 where a GPU rounds
    for value, wanted, most in zip(
        values, expected, allowed_errors(problem, dtype, expected), strict=True
    ):
        assert error(value, wanted) <= slack * most


def allowed_errors(problem, dtype, expected):
    """Returns the bound of each result: in 16 bits, 1.5 times the error of PyTorch's operators and one rounding.

    The rounding of the output, about a quarter of eps for a query, enters all gradients through grad · out, and adds up
    over the queries like a random walk.
    """
    if dtype == torch.float32:
        return [BOUND[dtype]] * len(expected)
    own = map(error, results_written_out(problem, dtype, dtype), expected)
    rounding = torch.finfo(dtype).eps * max(1.0, problem[0].shape[2] / 16) ** 0.5
    return [1.5 * of_torch + rounding for of_torch in own]


def in_tiles(patch, rows, columns):
    """Makes the Triton kernels compute tiles of this size, into outputs that begin as NaN."""
    kernels = pytest.importorskip("shardzoo.ops.triton_kernels.attention")

    def choose_tile(kernel, q, rules):
        if kernel is kernels.query_gradient and rules.bias is not None:
            return kernels.TileShape(max(rows, columns), min(rows, columns), 4, 1)
        return kernels.TileShape(rows, columns, 4, 1)

    patch.setattr(kernels, "choose_tile", choose_tile)
    for op in (OPS["attention"], OPS["attention_backward"]):
        empty = op.allocate
        patch.setattr(
            op, "allocate", lambda *a, empty=empty: tuple(t.fill_(math.nan) for t in empty(*a))
        )


def normal(*shape):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


WALLS = {  # rules whose limits lie on, beside and between the edges of tiles of 16
    "causal": {"causal": True},
    "prefix": {"causal": True, "prefix": torch.tensor([16, 35])},
    "lengths": {
        "key_lengths": torch.tensor([0, 33]),
        "mask": torch.tensor([-0.5, 2.0]).reshape(1, 2, 1, 1),
    },
    "all": {
        "causal": True,
        "prefix": torch.tensor([40, 17]),
        "key_lengths": torch.tensor([31, 48]),
        "dropout": 0.9,
    },
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    every_day(
        [("causal", (33, 34))],
        more=[
            ("all", (33, 48)),
            *((name, (33, 48)) for name in ("prefix", "lengths")),
            ("all", (49, 32)),
        ]
        + [(name, sizes) for name in WALLS for sizes in ((49, 32), (16, 16), (48, 48))],
    ),
    ids=str,
)
def test_triton_at_the_edges_of_tiles(name, sizes):
    """Grouped heads of an odd width, a bias, queries that see no key, and positions that do not begin at 0."""
    (queries, total), rules = (
        sizes,
        {"mask": None, "prefix": None, "key_lengths": None, "causal": False, "dropout": 0.0},
    )
    rules |= {"keys": ops.dropout_keys(3, 1, 2), "first_head": 2, "first_row": 7, **WALLS[name]}
    rules["relative_bias"] = normal(2, queries + total - 1)
    problem = (
        normal(2, 2, queries, 20),
        normal(2, 1, total, 20),
        normal(2, 1, total, 20).roll(1),
        rules,
    )
    with pytest.MonkeyPatch.context() as patch, ops.kernels("triton"):
        in_tiles(patch, 16, 16)
        values = results(problem, torch.float32)
    for value, wanted in zip(
        values, results_written_out(problem, torch.float64, torch.float32), strict=True
    ):
        assert error(value, wanted) <= BOUND[torch.float32]


def test_triton_reads_heads_where_they_lie():
    """Heads within a layer's features, a gradient without memory of its own, and a mask of one number for each key."""
    qkv, mask = normal(2, 21, 3, 2, 16).float(), normal(2, 1, 1, 21).float() > -1

    def run(*tensors):
        heads = [tensor.requires_grad_() for tensor in tensors]
        attention(*heads, scale=SCALE, mask=mask).sum().backward()
        return [tensor.grad for tensor in heads]

    lying = [x.detach().transpose(1, 2) for x in qkv.unbind(2)]
    with pytest.MonkeyPatch.context() as patch, ops.kernels("triton"):
        in_tiles(patch, 16, 16)
        first, again = run(*lying), run(*(x.detach().contiguous() for x in lying))
    assert all(map(torch.equal, first, again))


def with_short_values(q, k, v, rules):
    """Makes the gradients of the weights about 1.

    From them grad · out is subtracted, and nothing remains if a query sees one key; errors are relative to the terms.
    """
    return q, k, v * ((1 - rules["dropout"]) / v.shape[3] ** 0.5), rules


@pytest.fixture
def nan_filled(monkeypatch):
    """Lets the outputs of the kernels begin as NaN."""
    for op in (OPS["attention"], OPS["attention_backward"]):
        empty = op.allocate
        monkeypatch.setattr(
            op, "allocate", lambda *a, empty=empty: tuple(t.fill_(math.nan) for t in empty(*a))
        )


@settings(
    max_examples=400 if EVERY_CASE else 10, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    problem=problems(150, 150, sizes=(8, 24, 64, 80, 128), caps=(None, 0.7)),
    dtype=st.sampled_from(KERNEL_DTYPES),
)
def test_the_kernel_is_written_out_attention(nan_filled, problem, dtype):
    """With several tiles of 64 queries and keys, and parts of tiles."""
    problem = with_short_values(*problem)
    values, expected = results(problem, dtype), results_written_out(problem, torch.float64, dtype)
    for value, wanted, most in zip(
        values, expected, allowed_errors(problem, dtype, expected), strict=True
    ):
        assert error(value, wanted) <= most


@settings(
    max_examples=400 if EVERY_CASE else 40, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    problem=problems(5, 150, sizes=(3, 8, 24, 64, 80, 130), caps=(None, 0.7)),
    dtype=st.sampled_from(KERNEL_DTYPES),
)
def test_few_queries_are_written_out_attention(nan_filled, problem, dtype):
    """Up to four queries without dropout, as in decoding, are not arranged in tiles."""
    q, k, v, rules = problem
    problem = with_short_values(q, k, v, {**rules, "dropout": 0.0, "keys": None})
    values, expected = results(problem, dtype), results_written_out(problem, torch.float64, dtype)
    for value, wanted, most in zip(
        values, expected, allowed_errors(problem, dtype, expected), strict=True
    ):
        assert error(value, wanted) <= most


@pytest.mark.parametrize("kind", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"key_lengths": torch.tensor([100, 129])},  # padding
        {"causal": True, "window": 37, "dropout": 0.3},
        {"causal": True, "prefix": torch.tensor([3, 90]), "bias": True, "dropout": 0.3},
    ],
    ids=["padded", "window", "bias"],
)
def test_the_kernel_caps_scores(nan_filled, monkeypatch, kind, changes):
    """Parts of tiles, three query heads for each key-value head, and scores up to several times the cap."""
    for op in (OPS["attention"], OPS["attention_backward"]):
        monkeypatch.setattr(op, "reference", None)
    changes = dict(changes)
    rules = {"mask": None, "prefix": None, "key_lengths": None, "causal": False, "dropout": 0.0}
    rules |= {"keys": ops.dropout_keys(3, 1, 2), "first_head": 2, "first_row": 7, "softcap": 0.7}
    rules["relative_bias"] = normal(6, 101 + 129 - 1) if changes.pop("bias", False) else None
    if window := changes.pop("window", None):
        ages = torch.arange(101)[:, None] + 28 - torch.arange(129)
        rules["mask"] = (ages < window)[None, None]
    q, k, v = normal(2, 6, 101, 40), normal(2, 2, 129, 40), normal(2, 2, 129, 40).roll(1)
    problem = with_short_values(q, k, v, rules | changes)
    expected = results_written_out(problem, torch.float64, kind)
    allowed = allowed_errors(problem, kind, expected)
    for value, wanted, most in zip(results(problem, kind), expected, allowed, strict=True):
        assert error(value, wanted) <= most


@pytest.mark.parametrize("queries", [1, 70])
def test_capped_scores_are_exact_to_a_few_roundings(queries):
    """With one key, lse is its capped score: of small and large products, also of infinite ones and NaN."""
    magnitudes = torch.logspace(-6, 2, 4000 * queries, dtype=torch.float64).view(2, -1, queries, 1)
    products = torch.cat([magnitudes, -magnitudes]).float()
    products[0, 0, 0, 0] = math.inf
    products[1, 1, 0, 0] = math.nan
    key = torch.ones(4, products.shape[1], 1, 1)
    rules = (None, None, None, None, None, 1.0, False, 0.0, 0, 0, 2.5)
    lse = torch.ops.shardzoo.attention(products, key, key, *rules)[1]
    wanted = 2.5 * torch.tanh(products[..., 0].double() / 2.5)
    torch.testing.assert_close(lse.double(), wanted, rtol=5e-7, atol=0.0, equal_nan=True)
    assert lse.nan_to_num(0.0).abs().max() == 2.5


def long_problem():
    """Two blocks of 256 queries, of which the causal rule, prefixes, lengths and a mask hide whole tiles."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, heads, 300, 24, generator=generator) for heads in (4, 2, 2, 4))
    mask = torch.rand(2, 1, 1, 300, generator=generator) > 0.2
    mask[0, ..., 200:], mask[1, :, :, :] = False, True
    rules = {
        "prefix": torch.tensor([20, 170]),
        "key_lengths": torch.tensor([300, 130]),
        "causal": True,
        "mask": mask,
    }
    rules |= {"keys": ops.dropout_keys(1, 0, 2), "dropout": 0.2, "scale": SCALE}
    return (q, k, v, torch.randn(599, 4, generator=generator).t()), grad, rules


def outcome(tensors, grad, rules, dtype):
    """Returns the output and the gradients of attention on the tensors rounded to `dtype`."""
    out, grads = gradients(
        lambda q, k, v, b: attention(q, k, v, relative_bias=b, **rules),
        [x.to(dtype) for x in tensors],
        grad.to(dtype),
    )
    return out, *grads


@pytest.mark.parametrize(
    "kind", every_day(KERNEL_DTYPES[1:2], more=[KERNEL_DTYPES[0], *KERNEL_DTYPES[2:]]), ids=str
)
@pytest.mark.parametrize(
    ("steps", "added"),
    every_day(
        [((1, 2, 3), 0), ((0, 0, 0), 100)], more=[((3, 2, 1), 0), ((-3, -1, 0), 0), ((0, 0, 2), 0)]
    ),
)
def test_the_kernel_follows_scores_that_grow_from_tile_to_tile(nan_filled, kind, steps, added):
    """A tile's weights are relative to the largest score so far, to which earlier tiles are rescaled.

    The last tile's mask adds `added`, beside which exp(score) would overflow.
    """
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, 2, 192, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    q[..., 0] = torch.linspace(0.5, 1.5, 192)
    k[..., 0] = torch.tensor(steps).repeat_interleave(64) * 20
    rules = dict.fromkeys(("relative_bias", "prefix", "key_lengths", "keys"))
    rules["mask"] = (
        torch.tensor([0.0, 0.0, added]).repeat_interleave(64).double().expand(1, 1, 1, 192)
    )
    problem = q, k, v, {**rules, "causal": False, "dropout": 0.0, "first_head": 0, "first_row": 0}
    values, expected = results(problem, kind), results_written_out(problem, torch.float64, kind)
    for value, wanted, most in zip(
        values, expected, allowed_errors(problem, kind, expected), strict=True
    ):
        assert error(value, wanted) <= most


@pytest.mark.parametrize("kind", KERNEL_DTYPES, ids=str)
def test_the_kernel_skips_what_no_query_sees(nan_filled, kind):
    """The values of hidden keys do not even matter if they are NaN."""
    (q, k, v, bias), grad, rules = long_problem()
    expected = outcome([x.to(kind) for x in (q, k, v, bias)], grad.to(kind), rules, torch.float64)
    k[0, :, 200:], v[0, :, 200:], k[1, :, 192:] = math.nan, math.nan, math.nan
    for value, wanted in zip(outcome((q, k, v, bias), grad, rules, kind), expected, strict=True):
        assert error(value, wanted) <= BOUND[kind]


@pytest.mark.parametrize("kind", KERNEL_DTYPES, ids=str)
def test_the_bits_of_the_kernel_do_not_depend_on_threads(kind):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(outcome(*long_problem(), kind))
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )


def test_the_kernel_shares_the_processors_tiles_with_libraries():
    """A product and PyTorch's attention in bf16, which configure tile registers of their own, before and after ours."""
    x = torch.randn(2, 2, 160, 64, generator=torch.Generator().manual_seed(2)).bfloat16()

    def theirs():
        return x @ x.mT, torch.nn.functional.scaled_dot_product_attention(x, x, x)

    before, ours = theirs(), outcome(*long_problem(), torch.bfloat16)
    assert all(map(torch.equal, before, theirs()))
    assert all(map(torch.equal, ours, outcome(*long_problem(), torch.bfloat16)))


@pytest.mark.before_release
@pytest.mark.parametrize(
    "isa", every_day(["x86-64-v3"], more=["baseline", "x86-64-v4+bf16", "x86-64-v4"])
)
def test_every_instruction_set(isa, tmp_path):
    """In a process each; with a set that the processor lacks, this tests the next lower one again."""
    tensors, grad, rules = long_problem()
    torch.save((tensors, grad, rules), tmp_path / "problem.pt")
    command = [sys.executable, "-c", ONE_PROBLEM, str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"SHARDZOO_CPU_ISA": isa})
    for (dtype, softcap), values in torch.load(tmp_path / "values.pt").items():
        rules["softcap"] = softcap
        expected = outcome([x.to(dtype) for x in tensors], grad.to(dtype), rules, torch.float64)
        for value, wanted in zip(values, expected, strict=True):
            assert error(value, wanted) <= BOUND[dtype] / (4 if dtype == torch.bfloat16 else 1)


ONE_PROBLEM = """
import sys, torch
from shardzoo.ops import attention
(tensors, grad, rules), values = torch.load(sys.argv[1] + "/problem.pt"), {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for softcap in (None, 0.7):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = attention(*leaves[:3], relative_bias=leaves[3], softcap=softcap, **rules)
        values[dtype, softcap] = (out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype)))
torch.save(values, sys.argv[1] + "/values.pt")
"""


def test_merging_the_heads_copies_nothing():
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 3, 5, 8, dtype=dtype)
        assert attention(q, q, q, scale=SCALE).transpose(1, 2).is_contiguous()
        _, grads = gradients(
            lambda *x: attention(*x, scale=SCALE), (q, q[:, :1], q[:, :1]), torch.ones_like(q)
        )
        assert all(grad.transpose(1, 2).is_contiguous() for grad in grads)


def in_blocks(patch, rows):
    """Makes attention compute `rows` queries at a time."""
    patch.setattr(
        importlib.import_module("shardzoo.ops.attention"), "MIN_ROWS", rows
    )  # ops.attention is the function
    patch.setitem(BYTES_AT_ONCE, "cpu", 1)


def test_the_dropout_mask_is_that_of_the_softmax(monkeypatch):
    """With v the identity and equal scores, the output is the dropout mask over the number of keys."""
    in_blocks(monkeypatch, 3)
    keys, shape = ops.dropout_keys(5, 9, 2), (2, 3, 7, 8)
    q, v = torch.zeros(2, 3, 7, 8), torch.eye(8).expand(2, 3, 8, 8)
    for first_row in (0, 2):
        out = attention(
            q, v, v, scale=1.0, dropout=0.5, keys=keys, first_head=4, first_row=first_row
        )
        assert torch.equal(out != 0, kept(keys, shape, 0.5, 4, first_row))
    assert 0 < (out != 0).sum() < out.numel()


def test_the_mask_of_keys_does_not_depend_on_padding():
    q, k, v = (torch.randn(2, 3, 6, 8, dtype=torch.float64) for _ in range(3))
    keys, lengths, bias = (
        ops.dropout_keys(5, 9, 2),
        torch.tensor([6, 4]),
        torch.randn(3, 11, dtype=torch.float64),
    )

    def padded(width):
        wide = [torch.nn.functional.pad(t, (0, 0, 0, width - 6)) for t in (q, k, v)]
        by_distance = torch.nn.functional.pad(
            bias, (width - 6, width - 6)
        )  # other distances are of padding alone
        rules = {"key_lengths": lengths, "dropout": 0.3, "keys": keys, "relative_bias": by_distance}
        return attention(*wide, scale=SCALE, **rules)[:, :, :6]

    torch.testing.assert_close(padded(6), padded(11), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rows", [7, 64])
def test_the_size_of_blocks_does_not_matter(rows, monkeypatch):
    q, k, v, grad = (torch.randn(2, 3, 300, 16, dtype=torch.float64) for _ in range(4))
    bias = torch.randn(3, 599, dtype=torch.float64)
    rules = {
        "prefix": torch.tensor([20, 170]),
        "key_lengths": torch.tensor([300, 250]),
        "causal": True,
    }
    rules |= {"keys": ops.dropout_keys(1, 0, 2), "dropout": 0.2, "scale": SCALE}

    def run():
        out, grads = gradients(
            lambda q, k, v, b: attention(q, k, v, relative_bias=b, **rules), (q, k, v, bias), grad
        )
        return out, *grads

    whole = run()
    in_blocks(monkeypatch, rows)
    for value, wanted in zip(run(), whole, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rules", [{}, {"causal": True, "dropout": 0.2, "softcap": 0.7}])
def test_opcheck(rules):
    q, k, v = (torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3))
    bias, keys = torch.randn(2, 9, requires_grad=True), ops.dropout_keys(1, 0, 2)
    dropout = rules.get("dropout", 0.0)
    arguments = (
        q,
        k,
        v,
        bias,
        None,
        None,
        None,
        keys,
        SCALE,
        rules.get("causal", False),
        dropout,
        0,
        0,
        rules.get("softcap", 0.0),
    )
    torch.library.opcheck(torch.ops.shardzoo.attention.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 2, 5, 8)}, "N a multiple of K"),
        ({"relative_bias": torch.zeros(3, 8)}, r"\[N, Sq \+ Sk - 1\] = \(3, 9\), got \(3, 8\)"),
        ({"mask": torch.ones(5, 5) > 0}, "give it four dimensions"),
        ({"mask": torch.zeros(1, 1, 5, 5, dtype=torch.int64)}, "must be boolean"),
        ({"prefix": torch.tensor([1, 2])}, "needs causal=True"),
        ({"key_lengths": torch.tensor([1])}, r"one integer per sample, shape \(2,\)"),
        ({"dropout": 0.1}, "needs int64 `keys`"),
        ({"dropout": 1.0}, "less than 1, got 1.0"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = dict.fromkeys(("q", "k", "v"), torch.zeros(2, 3, 5, 8)) | {"scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_a_flop_counter_counts_both_products_once(choice, precision):
    from torch.utils.flop_counter import FlopCounterMode

    q, k = (torch.randn(2, heads, 96, 16, dtype=precision, requires_grad=True) for heads in (4, 2))
    with ops.kernels(choice), FlopCounterMode(display=False) as counter:
        ops.attention(q, k, k, scale=1.0)
    assert counter.get_total_flops() == 2 * 2 * (2 * 4 * 96 * 96 * 16)


def test_attention_compiles_without_a_break():
    q = torch.randn(1, 2, 96, 16, requires_grad=True)

    def computed(function):
        out = function(q, q, q, scale=1.0, causal=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), q)]

    torch.testing.assert_close(
        computed(torch.compile(ops.attention, backend="aot_eager", fullgraph=True)),
        computed(ops.attention),
    )
