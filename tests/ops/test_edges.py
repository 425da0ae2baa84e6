"""Ragged, empty, strided, misaligned, fully masked and non-finite inputs, and huge tensors."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from every_case import EVERY_CASE, by_turns, every_day
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo import ops

NAN, INF = float("nan"), float("inf")
RELAXED = settings(
    max_examples=6 if EVERY_CASE else 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def strided(tensor, how):
    """The same values in another memory layout."""
    if how == "misaligned":
        buffer = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[3:].view(tensor.shape)
        return buffer.copy_(tensor)
    if how == "strided":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 7).to(tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if how == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


@RELAXED
@given(rows=st.integers(1, 9), columns=st.integers(1, 70), seed=st.integers(0, 99), how=st.data())
def test_layouts_do_not_matter(zoo, case_name, variant, rows, columns, seed, how):
    """Bit for bit the result of contiguous inputs; PyTorch's own sums depend on the layout in the last bits."""
    if variant == "triton":
        rows = min(rows, 2)  # the interpreter takes milliseconds per row
    case = zoo.cases(rows, columns, seed)[case_name]
    layout = how.draw(st.sampled_from(["misaligned", "strided", "transposed"]))
    moved = {
        name: None if t is None else strided(t.float() if t.is_floating_point() else t, layout)
        for name, t in case.tensors.items()
    }
    expected = case.run(variant, torch.float32)
    other = zoo.Case(case.function, moved, case.differentiable, case.constants).run(
        variant, torch.float32
    )
    for name, value in expected.items():
        if variant == "reference":
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(value, other[name]), (name, layout)


@RELAXED
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    columns=st.integers(1, 70),
    special=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 69), st.sampled_from([NAN, INF, -INF])),
        max_size=4,
    ),
)
def test_non_finite_inputs(zoo, case_name, variant, dtype, columns, special):
    """NaN and infinities come out where the fp64 reference has them, and nowhere else."""
    case = zoo.cases(5, columns)[case_name]
    first = case.tensors[case.differentiable[0]]
    rows = list(itertools.product(*map(range, first.shape[:-1])))
    for row, column, value in special:
        first[(*rows[row % len(rows)], column % first.shape[-1])] = value
    expected = case.rounded(dtype).run("reference", torch.float64, with_grad=False)
    # one number normalizes to rounding errors, and a maximum of 1e300 is another one in fp32
    zoo.close(
        case.run(variant, dtype, with_grad=False),
        expected,
        dtype,
        slack=2.0,
        floor=1.0 if columns == 1 else 0.0,
    )


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)], ids=str)
def test_empty(variant, shape):
    x = torch.randn(2, *shape, requires_grad=True)
    weight = torch.ones(shape[-1], requires_grad=True)
    with ops.kernels(variant):
        results = [
            ops.bias_gelu(x, weight),
            ops.swiglu(x, x),
            ops.dropout(x, 0.5, ops.dropout_keys(1, 0, 2)),
            *(
                [ops.rms_norm(x, weight, 1e-6), ops.layer_norm(x, weight, weight, 1e-5)]
                if shape[-1]
                else []
            ),
            ops.masked_softmax(x[None], causal=True)[0],
        ]
        assert all(result.shape == x.shape for result in results)
        sum(result.sum() for result in results).backward()
    assert not weight.grad.any()
    assert x.grad.shape == x.shape


def test_rows_that_see_nothing_are_zero(variant, dtype):
    scores = torch.randn(2, 2, 4, 19).to(dtype).requires_grad_()
    mask = torch.ones(2, 1, 4, 19, dtype=torch.bool)
    mask[1, 0, 2] = False
    bias = torch.zeros(1, 1, 1, 19, dtype=dtype).index_fill_(3, torch.arange(19), -INF)
    with ops.kernels(variant):
        probs = ops.masked_softmax(scores, mask)
        probs.square().sum().backward()
        assert not ops.masked_softmax(scores, bias).any()
        # more queries than keys: the first queries of a causal mask see nothing
        tall = ops.masked_softmax(scores.transpose(2, 3), causal=True)
    assert not probs[1, :, 2].any()
    assert not scores.grad[1, :, 2].any()
    assert not scores.grad.isnan().any()
    assert not tall[:, :, :15].any()
    torch.testing.assert_close(
        tall[:, :, 15:].sum(-1).float(), torch.ones(2, 2, 4), rtol=2**-7, atol=0
    )


@pytest.mark.parametrize("hidden", [-1e4, -1e10, -1e15, "least"])
def test_large_numbers_hide(variant, dtype, hidden):
    """A mask of numbers on every key, and a vocabulary that begins with thousands of hidden words."""
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    hidden = least if hidden == "least" else max(hidden, least)
    logits = torch.linspace(-1, 1, 3000).repeat(2, 1).to(dtype)
    logits[:, :2100] = hidden
    target = torch.tensor([2999, 2500])
    with ops.kernels(variant):
        mask = torch.full((1, 1, 1, 8), hidden).to(dtype)
        probs = ops.masked_softmax(torch.zeros(1, 1, 2, 8, dtype=dtype), mask)
        torch.testing.assert_close(probs, torch.full_like(probs, 1 / 8))
        losses = ops.token_cross_entropy(logits, target, num_classes=3000)
    expected = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)


def test_masked_nan_is_not_seen(variant):
    scores = torch.zeros(1, 1, 3, 3)
    scores[0, 0, 0, 2] = NAN
    with ops.kernels(variant):
        assert not ops.masked_softmax(scores, causal=True).isnan().any()
        assert ops.masked_softmax(scores)[0, 0].isnan().all(-1).tolist() == [True, False, False]


def test_small_exponentials_are_zero(zoo):
    """Denormal ones would take Intel's processors a hundred times as long, and a mask makes every score one."""
    if "cpp" not in zoo.variants:
        pytest.skip("the compiled kernels are not built")
    exponents = torch.cat([torch.arange(-130.0, 0.25, 0.25), torch.tensor([0.0, -INF])])
    with ops.kernels("cpp"):
        found = ops.masked_softmax(exponents[None, None, None])[0, 0, 0]
    torch.testing.assert_close(found.double(), exponents.double().softmax(0), rtol=1e-6, atol=1e-38)
    assert not found[exponents < -87.4].any()
    assert found[(exponents > -85)].all()


@pytest.mark.parametrize("length", [1, 2, 3, 17, 1000, 4097, 16384])
def test_sequence_lengths(zoo, variant, length):
    if variant == "triton" and length > 5000:
        length = 5000  # the interpreter's tensors hold 2^20 elements at most
    x = torch.randn(1, 1, 2, length, dtype=torch.float64)
    case = zoo.Case(ops.masked_softmax, {"scores": x}, ("scores",), {"scale": 0.7})
    expected = case.rounded(torch.float32).run("reference", torch.float64)
    zoo.close(
        case.run(variant, torch.float32),
        expected,
        torch.float32,
        floor=1e-6 if length == 1 else 0.0,
    )


@pytest.mark.parametrize(("classes", "tokens"), [(7, 5), (250112, 3)])
def test_vocabularies_in_shards(variant, classes, tokens):
    """Statistics of three padded shards combine to the loss and the gradient of the whole."""
    g = torch.Generator().manual_seed(classes)
    logits = torch.randn(tokens, classes, generator=g)
    target = torch.randint(classes, (tokens,), generator=g)
    target[0] = -100
    width = -(-classes // 3) + 2
    smoothing = {"num_classes": classes, "label_smoothing": 0.1, "z_loss": 1e-3}
    shards = []
    for first in range(0, 3 * width, width):
        columns = max(min(classes - first, width), 0)
        padded = torch.full((tokens, width), NAN)  # padding must not be read
        padded[:, :columns] = logits[:, first : first + columns]
        shards.append((padded, first, columns))
    with ops.kernels(variant):
        stats = [
            ops.cross_entropy_stats(shard, target, first, columns)
            for shard, first, columns in shards
        ]
        top = torch.stack([s[0] for s in stats]).amax(0)
        log_z = top + torch.log(sum(s[1] * torch.exp(s[0] - top) for s in stats))
        picked, total = sum(s[2] for s in stats), sum(s[3] for s in stats)
        losses = ops.cross_entropy_loss(log_z, picked, total, target, **smoothing)
        grads = [
            ops.cross_entropy_grad(
                shard, target, torch.ones(tokens), log_z, first=first, columns=columns, **smoothing
            )[:, :columns]
            for shard, first, columns in shards
        ]
    wide = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        wide, target, reduction="none", label_smoothing=0.1
    )
    expected = expected + (target != -100) * 1e-3 * wide.logsumexp(-1).square()
    expected.sum().backward()
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(grads, 1).double(), wide.grad, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "floats",
    by_turns(every_day([torch.bfloat16, torch.float32], more=[torch.float16, torch.float64]), 2),
)
def test_same_bits_for_any_thread_count(zoo, case_name, floats):
    """And from run to run; PyTorch's own operators do not promise it."""
    if "cpp" not in zoo.variants:
        return
    case = zoo.cases(150, 129)[case_name]
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            runs.append(case.run("auto", floats))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(value, other[name]) for name, value in runs[0].items())


@contextlib.contextmanager
def repeated_rows(count: int, columns: int) -> Iterator[torch.Tensor]:
    """[count, columns] in bf16 and zero: rows 0, 32, 64, ... are one memory, and so on; the last row is of its own."""
    chunk, row = 64 * columns, 2 * columns  # bytes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, *[ctypes.c_size_t] * 5],
    )
    file = os.memfd_create("rows")
    os.truncate(file, chunk + row)
    start = libc.mmap(
        None, count * row, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 2**64 - 1, 0
    )
    places = [
        *((offset, 0, chunk) for offset in range(0, (count - 1) * row, chunk)),
        ((count - 1) * row, chunk, row),
    ]
    for offset, source, size in places:
        place = start + offset
        fixed = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        assert (
            libc.mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, file, source) == place
        )
    os.close(file)
    memory = (ctypes.c_char * (count * row)).from_address(start)
    yield torch.frombuffer(memory, dtype=torch.bfloat16).view(count, -1)
    assert libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(count * row)) == 0


def test_offsets_beyond_two_to_the_31(zoo):
    """A bf16 tensor of 2^31 + 2^20 elements, written in place."""
    # the reference would widen all of it to fp32, several times over
    with repeated_rows((1 << 11) + 1 if "cpp" in zoo.variants else 33, 1 << 20) as x:
        x[-1] = torch.linspace(-4, 4, 1 << 20)
        last = x[-1:].clone()
        torch.ops.shardzoo.bias_gelu_out(x, None, False, y=x)
        assert torch.equal(x[-1:], ops.bias_gelu(last))
        assert not x[:32].any()


@pytest.mark.before_release
@pytest.mark.parametrize("isa", ["baseline", "x86-64-v3", "x86-64-v4", "x86-64-v4+bf16"])
def test_every_instruction_set(isa):
    """The same cases on the code for older processors, in a process that asks for it."""
    names = ("test_few", "test_a_row", "test_non_finite", "test_the_kernel", "test_a_sum")
    chosen = " or ".join(("(test_matches_fp64 and cpp and 5 and 37)", *names))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-k",
        chosen,
    ]
    files = [
        os.path.join(os.path.dirname(__file__), name)
        for name in ("test_variants.py", "test_matmul.py", "test_attention.py")
    ]
    environment = {**os.environ, "SHARDZOO_CPU_ISA": isa}
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout[
        -3000:
    ]  # 5: nothing to run, because nothing is compiled
