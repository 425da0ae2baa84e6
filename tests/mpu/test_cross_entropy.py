"""Vocabulary-parallel cross-entropy against `torch.nn.functional.cross_entropy` on the gathered logits."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from memory import peak_of
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardzoo.mpu import head_losses, vocab_parallel_cross_entropy

GARBAGE = 1e4  # what padding columns hold: any of it in the softmax would decide the loss


def reference(logits, labels, smoothing, z_loss, reduction):
    """Torch's loss plus the z-loss."""
    flat, target = logits.flatten(0, -2), labels.flatten()
    losses = F.cross_entropy(flat, target, label_smoothing=smoothing, reduction="none")
    losses = losses + z_loss * (flat.logsumexp(-1) ** 2).masked_fill(target == -100, 0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / (target != -100).sum() if reduction == "mean" else losses.sum()


def split_loss(mesh, padded, labels, classes, options, chunk):
    width = padded.shape[-1] // mesh.tp_size
    local = padded[
        ..., mesh.tp_rank * width : (mesh.tp_rank + 1) * width
    ].requires_grad_()  # not contiguous
    import_module("shardzoo.ops.cross_entropy").CHUNK_ELEMENTS = chunk
    kept = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, labels, num_classes=classes, mesh=mesh, **options)
    [grad] = torch.autograd.grad(loss.sum() * 3, local)
    torch.testing.assert_close(
        local.detach(), kept, rtol=0, atol=0, equal_nan=True
    )  # logits are not ours
    return loss.detach(), grad


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_equals_torch(tp, run_mesh):
    @given(
        shape=st.lists(st.integers(0, 4), min_size=1, max_size=2),
        classes=st.integers(1, 19),
        padding=st.integers(0, 5),
        smoothing=st.sampled_from([0.0, 0.1]),
        z_loss=st.sampled_from([0.0, 1e-2]),
        reduction=st.sampled_from(["mean", "sum", "none"]),
        ignored=st.sampled_from([0.0, 0.5, 1.0]),
        scale=st.sampled_from([1.0, 50.0]),
        chunk=st.sampled_from([1, 40, 1 << 21]),
    )
    @example([3, 4], 11, 2, 0.1, 1e-2, "mean", 0.5, 50.0, 40)
    @example([3, 4], 11, 2, 0.0, 0.0, "none", 0.5, 1.0, 1 << 21)
    def check(shape, classes, padding, smoothing, z_loss, reduction, ignored, scale, chunk):
        generator = torch.Generator().manual_seed(0)
        logits = scale * torch.randn(*shape, classes, generator=generator)
        labels = torch.randint(classes, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < ignored] = -100
        width = -(-classes // tp) + padding
        padded = F.pad(logits, (0, width * tp - classes), value=GARBAGE)
        logits.requires_grad_()
        expected = reference(logits, labels, smoothing, z_loss, reduction)
        [expected_grad] = torch.autograd.grad(expected.sum() * 3, logits)
        expected_grad = F.pad(expected_grad, (0, width * tp - classes))
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
        results = run_mesh(tp, split_loss, padded, labels, classes, options, chunk)
        for rank, (loss, grad) in enumerate(results):
            # 50-fold logits cancel: lse - x_target loses two digits of fp32.
            torch.testing.assert_close(
                loss, expected.detach(), rtol=1e-5, atol=1e-6 * scale, equal_nan=True
            )
            expected_part = expected_grad[..., rank * width : (rank + 1) * width]
            if (labels == -100).all() and reduction == "mean":
                continue  # 0 / 0: both are NaN where a row is kept, and no row is
            torch.testing.assert_close(grad, expected_part, rtol=1e-5, atol=1e-6 * scale)
            assert torch.equal(loss, results[0][0]) or loss.isnan().any()  # bit-equal on every rank

    check()


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(tp, dtype, run_mesh):
    """The loss is fp32, or fp64 for fp64; the gradient has the logits' dtype and is rounded to it once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 8, 3 * 11, generator=generator).to(dtype)
    labels = torch.randint(33, (5, 8), generator=generator)
    exact = logits.double().requires_grad_()
    expected = reference(exact, labels, 0.1, 1e-4, "mean")
    [expected_grad] = torch.autograd.grad(expected * 3, exact)
    options = {"label_smoothing": 0.1, "z_loss": 1e-4}
    results = run_mesh(tp, split_loss, logits, labels, None, options, 1 << 21)
    rtol = 1e-12 if dtype == torch.float64 else 2**-8
    for loss, grad in results:
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert grad.dtype == dtype
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=min(rtol, 1e-6), atol=0.0)
    whole = torch.cat([grad for _, grad in results], -1).double()
    torch.testing.assert_close(whole, expected_grad, rtol=rtol, atol=1e-7 if rtol > 1e-6 else 1e-15)


def test_gradcheck():
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 6])
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_cross_entropy(x, labels, label_smoothing=0.2, z_loss=0.1),
        (logits,),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_infinite_logits_and_ignored_rows(tp, run_mesh):
    """-inf is an impossible class, also where it is all a rank has; an ignored row may even hold NaN."""
    logits = torch.zeros(3, 4)
    logits[0, :2] = float("-inf")
    logits[2] = float("nan")
    labels = torch.tensor([3, 0, -100])
    results = run_mesh(tp, split_loss, logits, labels, None, {"reduction": "none"}, 1 << 21)
    expected = torch.tensor([2.0, 4.0]).log()
    for loss, _ in results:
        torch.testing.assert_close(loss, torch.cat([expected, torch.zeros(1)]))
    grad = torch.cat([grad for _, grad in results], -1)
    torch.testing.assert_close(grad[0], 3 * torch.tensor([0.0, 0.0, 0.5, -0.5]))
    assert torch.equal(grad[2], torch.zeros(4))


def test_nan_logits_are_not_hidden():
    logits = torch.zeros(2, 4)
    logits[0, 1] = float("nan")
    assert vocab_parallel_cross_entropy(logits, torch.tensor([0, 0])).isnan()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bad", [-1, 7, 8, -101])
def test_a_label_outside_the_classes_is_an_error(tp, bad, run_mesh):
    def refused(mesh):
        with pytest.raises(ValueError, match=rf"label {bad} is outside 0\.\.6"):
            vocab_parallel_cross_entropy(
                torch.zeros(2, 8 // mesh.tp_size), torch.tensor([0, bad]), num_classes=7, mesh=mesh
            )

    run_mesh(tp, refused)


def test_wrong_arguments_are_refused():
    logits, labels = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="num_classes 9 must be between 1 and the 8 columns"):
        vocab_parallel_cross_entropy(logits, labels, num_classes=9)
    with pytest.raises(ValueError, match=r"labels \(1,\) do not match logits \(2, 8\)"):
        vocab_parallel_cross_entropy(logits, labels[:1])
    with pytest.raises(ValueError, match="reduction 'max'"):
        vocab_parallel_cross_entropy(logits, labels, reduction="max")  # type: ignore[arg-type]


class LargestWide(TorchDispatchMode):
    """The number of elements of the largest fp32 tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_fp32_copy_of_the_logits_and_no_gathered_logits():
    logits = torch.randn(
        1 << 10, 1 << 13, dtype=torch.bfloat16, requires_grad=True
    )  # 8 Mi elements
    labels = torch.randint(1 << 13, (1 << 10,))
    with LargestWide() as wide:
        vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1).backward()
    assert (
        0
        < wide.largest
        <= import_module("shardzoo.ops.cross_entropy").CHUNK_ELEMENTS
        < logits.numel()
    )


def split_head_losses(mesh, hidden, weight, bias, labels, grad, chunked, softcap):
    """Returns a rank's losses and gradients. The limits are set here, because a rank is a process of its own."""
    rows = slice(mesh.tp_rank * 4, mesh.tp_rank * 4 + 4)
    own = [
        hidden.clone().requires_grad_(),
        weight[rows].clone().requires_grad_(),
        bias[rows].clone().requires_grad_(),
    ]
    code = import_module("shardzoo.ops.linear_cross_entropy")
    with pytest.MonkeyPatch.context() as patch:
        if chunked:  # of two rows, or of one column
            patch.setattr(code, "MAX_WHOLE_LOGITS", 1)
            patch.setattr(code, "CHUNK_LOGITS", 8)
        if chunked == "columns":
            patch.setattr(code, "ROW_CHUNK_DEVICES", ())
            for name in ("BLOCK_LOGITS", "MIN_COLUMNS", "COLUMN_UNIT", "ALIGNED_ELEMENTS"):
                patch.setattr(code, name, 1)
        with LargestWide() as wide:
            losses = head_losses(*own, labels, num_classes=7, softcap=softcap, mesh=mesh)
            once = torch.autograd.grad(losses, own, grad, retain_graph=True)
            # Of logits that the first pass has written over.
            again = torch.autograd.grad(losses, own, grad)
    # The weight has 12 elements here, hidden 15, and all the logits of a rank 20.
    if chunked != "columns":  # whose statistics are more than these few logits
        assert (wide.largest < 20) == bool(chunked)
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    return losses.detach(), *once


@pytest.mark.parametrize(
    ("chunked", "equal", "softcap"),
    [
        (False, False, None),
        ("rows", False, None),
        ("rows", True, 0.6),
        ("columns", False, None),
        ("columns", True, 0.6),
        (False, False, 0.6),
    ],
)
def test_losses_of_a_head(chunked, equal, softcap, run_mesh):
    """Chunks of rows compute the gradients with the losses, and again if the gradients of the counted losses differ."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias, grad = (
        torch.randn(s, generator=generator) for s in ((5, 3), (8, 3), (8,), (5,))
    )
    labels = torch.tensor([0, 6, -100, 3, 5])
    if equal:
        grad[labels >= 0] = 0.3
    weight[7], bias[7] = GARBAGE, GARBAGE
    whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = F.linear(*whole)[:, :7]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, reduction="none")
    grads = torch.autograd.grad(expected, whole, grad)
    ranks = run_mesh(2, split_head_losses, hidden, weight, bias, labels, grad, chunked, softcap)
    for losses, hidden_grad, _, _ in ranks:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(hidden_grad, grads[0], rtol=1e-5, atol=1e-5)
    for split, parameter_grad in ((2, grads[1]), (3, grads[2])):
        torch.testing.assert_close(
            torch.cat([rank[split] for rank in ranks]), parameter_grad, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(ValueError, match=r"label 7 is outside 0\.\.6"):
        head_losses(hidden, weight, bias, torch.full((5,), 7), num_classes=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_many_logits_never_exist_whole(dtype, has_bias, equal, monkeypatch):
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(200, 16).to(dtype),
        torch.randn(1000, 16).to(dtype),
        torch.randn(1000).to(dtype),
    )
    labels, grad = torch.randint(990, (200,)), torch.rand(200)
    labels[3] = -100
    if equal:
        grad[:] = 1 / 199

    def run():
        leaves = [
            tensor.detach().requires_grad_() for tensor in (hidden, weight, bias)[: 2 + has_bias]
        ]
        losses = head_losses(*leaves, *[None] * (not has_bias), labels, num_classes=990)
        results.append((losses.detach(), *torch.autograd.grad(losses, leaves, grad)))

    results = []
    peaks = [peak_of(run)]
    monkeypatch.setattr(import_module("shardzoo.ops.linear_cross_entropy"), "MAX_WHOLE_LOGITS", 1)
    monkeypatch.setattr(import_module("shardzoo.ops.linear_cross_entropy"), "CHUNK_LOGITS", 7000)
    peaks.append(peak_of(run))
    assert peaks[1] < 200 * 1000 * dtype.itemsize < peaks[0]
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    for ours, expected in zip(results[1], results[0], strict=True):
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
        assert ours.dtype == expected.dtype
    if dtype == torch.bfloat16 and has_bias and not equal:
        # Both are fp32 sums of the same numbers, rounded once; sums of rounded sums differ in a third of the elements.
        assert (results[1][3] != results[0][3]).float().mean() < 0.02


def test_a_head_refuses_a_label_outside_the_classes():
    hidden, weight = torch.ones(2, 4), torch.ones(8, 4)
    for bad in (7, -1):
        with pytest.raises(ValueError, match="label"):
            head_losses(hidden, weight, None, torch.tensor([0, bad]), num_classes=7)
