"""Attention of samples without padding: the Triton kernels in the interpreter and the reference, against PyTorch's
operators in fp64 on each sample alone, and broken kernels.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from attention_oracle import BOUNDS, attend_in_fp64, load_mutant
from every_case import by_turns

from shardzoo import ops
from shardzoo.ops.registration import OPS

kernels = pytest.importorskip("shardzoo.ops.triton_kernels.attention")

SCALE = 0.3
FIRST_HEAD = 3
# The queries of each sample, and the keys. One has fewer than a tile, one has none, one has several tiles.
SAMPLES = {
    "self": ((5, 0, 37, 16, 1), (5, 0, 37, 16, 1)),
    "cross": ((9, 9, 9), (34, 1, 17)),
    "longer": ((3, 20), (19, 33)),
    "no keys": ((4, 18), (0, 18)),
}
RULES = [(), ("causal",), ("bias",), ("dropout",), ("causal", "bias", "dropout")]


class Case(NamedTuple):
    samples: str
    rules: tuple[str, ...]
    width: int
    queries_per_kv: int
    dtype: torch.dtype

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.samples}-{'+'.join(self.rules) or 'plain'}-{self.width}-{self.queries_per_kv}-{kind}"


def list_cases():
    """Returns all combinations of samples, rules and widths; types and groups take turns."""
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16])
    groups = itertools.cycle([1, 2, 1, 3])
    shapes = itertools.product(SAMPLES, RULES, (16, 40, 64))
    return [Case(*shape, next(groups), next(dtypes)) for shape in shapes]


CASES = list_cases()


def make_problem(case):
    """Returns q, k, v and the bias, the gradient of the output, and the other arguments of the operator."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    queries, keys = SAMPLES[case.samples]
    heads = 2 * case.queries_per_kv

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dropout = 0.3 if "dropout" in case.rules else 0.0
    q = normal(sum(queries), heads, case.width) * (8 / case.width) ** 0.5
    # As in a model, keys and values are views of one tensor.
    pair = normal(sum(keys), 4, case.width)
    pair[:, 2:] *= (1 - dropout) / case.width**0.5
    # The longest sample, and three positions more: a caller may know a bound alone.
    longest = (max(queries) + 3, max(keys) + 3)
    bias = normal(heads, sum(longest) - 1) if "bias" in case.rules else None
    grad = normal(*q.shape).to(case.dtype)
    starts = [torch.tensor([0, *itertools.accumulate(lengths)]) for lengths in (queries, keys)]
    sample_keys = ops.dropout_keys(77, 4, len(queries)) if dropout else None
    pair = pair.to(case.dtype)
    tensors = [
        q.to(case.dtype),
        pair[:, :2],
        pair[:, 2:],
        None if bias is None else bias.to(case.dtype),
    ]
    rules = (sample_keys, *longest, SCALE, "causal" in case.rules, dropout, FIRST_HEAD)
    return tensors, grad, starts, rules


def compute_expected(tensors, grad, starts, rules):
    """Returns the output, the gradients and the log of the sums, from each sample alone."""
    sample_keys, max_queries, _, scale, causal, dropout, first_head = rules
    leaves = [None if x is None else x.double().requires_grad_() for x in tensors]
    q, k, v, bias = leaves
    outputs, every_lse = [], []
    for b in range(len(starts[0]) - 1):
        queries, keys = (slice(int(x[b]), int(x[b + 1])) for x in starts)
        count = queries.stop - queries.start
        first = max_queries - count
        own_bias = None
        if bias is not None:
            own_bias = bias[:, first : first + max(count + keys.stop - keys.start - 1, 0)]
        own_keys = None if sample_keys is None else sample_keys[b : b + 1]
        own = [x[rows].transpose(0, 1)[None] for x, rows in ((q, queries), (k, keys), (v, keys))]
        if not count:
            continue
        own_rules = (None, None, None, own_keys, scale, causal, dropout, first_head, 0, 0.0)
        if keys.stop == keys.start:
            out, lse = torch.zeros_like(own[0]), own[0].new_full(own[0].shape[:3], -math.inf)
        else:
            out, lse = attend_in_fp64([*own, own_bias], own_rules)
        outputs.append(out[0].transpose(0, 1))
        every_lse.append(lse.flatten())
    out = torch.cat(outputs)
    given = [x for x in leaves if x is not None]
    return [
        out.detach(),
        *torch.autograd.grad(out, given, grad.double()),
        torch.cat(every_lse).detach(),
    ]


def compute_by(module, tensors, grad, starts, rules):
    """Returns what a module's kernels compute into tensors of NaN."""
    *heads, bias = tensors
    arguments = (*heads, *starts, bias, *rules)
    outputs = [x.fill_(math.nan) for x in OPS["varlen_attention"].allocate(*arguments)]
    module.launch_varlen_forward(*arguments, *outputs)
    arguments = (grad, *outputs, *arguments)
    grads = [x.fill_(math.nan) for x in OPS["varlen_attention_backward"].allocate(*arguments)]
    module.launch_varlen_backward(*arguments, *grads)
    return [outputs[0], *grads[: 3 if bias is None else 4], outputs[1]]


def find_error(module, case):
    """Returns the largest error of any result as a share of its largest value."""
    problem = make_problem(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose_tile", lambda *_, **__: module.TileShape(16, 16, 4, 1))
        results = compute_by(module, *problem)
    worst = 0.0
    for value, wanted in zip(results, compute_expected(*problem), strict=True):
        finite = wanted.isfinite()
        if not torch.equal(value[~finite].double(), wanted[~finite]):
            return math.inf
        difference = (value.double() - wanted)[finite].abs().max().item()
        worst = max(worst, difference / max(1.0, wanted[finite].abs().max().item()))
        if math.isnan(difference):
            return math.inf
    return worst


@pytest.mark.parametrize("case", by_turns(CASES, 30), ids=str)
def test_triton_computes_each_sample_alone(case):
    assert find_error(kernels, case) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("case", by_turns(CASES, 20), ids=str)
def test_the_reference_computes_each_sample_alone(case):
    tensors, grad, starts, rules = make_problem(case)
    leaves = [None if x is None else x.double().requires_grad_() for x in tensors]
    names = ("keys", "max_queries", "max_keys", "scale", "causal", "dropout", "first_head")
    with ops.kernels("reference"):
        out = ops.varlen_attention(
            *leaves[:3], *starts, relative_bias=leaves[3], **dict(zip(names, rules, strict=True))
        )
        out.backward(grad.double())
    expected = compute_expected(tensors, grad, starts, rules)
    results = [out.detach(), *[x.grad for x in leaves if x is not None]]
    for value, wanted in zip(results, expected, strict=False):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-11)


def test_the_operator_is_registered_with_its_gradient():
    tensors, _, starts, rules = make_problem(CASES[12])
    leaves = [None if x is None else x.float().requires_grad_() for x in tensors]
    *heads, bias = leaves
    torch.library.opcheck(
        torch.ops.shardzoo.varlen_attention.default, (*heads, *starts, bias, *rules)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 3, 8)}, "N a multiple of K"),
        ({"key_starts": torch.tensor([0.0, 4.0])}, "int32 or int64"),
        ({"key_starts": torch.tensor([0, 2, 4])}, "as many as query_starts"),
        ({"relative_bias": torch.zeros(2, 9)}, r"\(2, 7\), got \(2, 9\)"),
        ({"dropout": 0.5}, "one per sample"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_what_does_not_match_is_named(changes, message):
    arguments = {
        "q": torch.zeros(4, 2, 8), "k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8),
        "query_starts": torch.tensor([0, 4]), "key_starts": torch.tensor([0, 4]), "max_queries": 4, "max_keys": 4,
        "scale": 1.0, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ops.varlen_attention(**arguments)


def find_case(samples, rules):
    return next(
        case for case in CASES if case[:2] == (samples, rules) and case.dtype == torch.float32
    )


# name: (text of the kernels, what replaces it, a case that reaches it); none reads beyond the tensors
MUTANTS = {
    "samples begin at the first row": (
        "tl.load(starts + b).to(tl.int64) * strides[2]", "tl.cast(0, tl.int64) * strides[2]", find_case("self", ()),
    ),
    "as many keys as queries": ("at = rules.key_starts + b", "at = rules.query_starts + b", find_case("cross", ())),
    "gradients at the places of equal lengths": (
        "place = tl.load(starts + b).to(tl.int64)", "place = tl.cast(b, tl.int64) * length", find_case("cross", ()),
    ),
    "statistics in the order of heads": (
        "tl.cast(n, tl.int64) * sizes.queries", "tl.cast(n, tl.int64)", find_case("cross", ()),
    ),
    "distance 0 at a sample's own place": (
        "rules.bias_stride + rules.bias_center", "rules.bias_stride + (sizes.queries - 1)",
        find_case("self", ("bias",)),
    ),
    "blocks behind the last query leave sums": (
        "stop = tl.where(has_queries, stop, 0)", "stop = tl.where(has_queries, stop, stop)",
        find_case("self", ("bias",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(MUTANTS, 6))
def test_a_broken_kernel_is_caught(name, tmp_path):
    text, replacement, case = MUTANTS[name]
    assert find_error(kernels, case) <= BOUNDS[case.dtype]
    assert find_error(load_mutant(kernels, tmp_path, text, replacement), case) > BOUNDS[case.dtype]
