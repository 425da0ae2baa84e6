"""The loss of a head in blocks of columns, as on an accelerator, beside the formula in fp64 and the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardzoo.ops import linear_cross_entropy

# What a call needs besides tensors.
PLAIN: dict[str, Any] = {}
ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2}


@pytest.fixture
def in_blocks(monkeypatch):
    """Lets a CPU compute blocks of columns, of about so many logits."""
    code = module()

    def divide(logits: int) -> None:
        monkeypatch.setattr(code, "MAX_WHOLE_LOGITS", 1)
        monkeypatch.setattr(code, "ROW_CHUNK_DEVICES", ())
        monkeypatch.setattr(code, "BLOCK_LOGITS", logits)
        monkeypatch.setattr(code, "MIN_COLUMNS", 1)
        monkeypatch.setattr(code, "COLUMN_UNIT", 1)
        monkeypatch.setattr(code, "ALIGNED_ELEMENTS", 8)

    return divide


def module() -> Any:
    from importlib import import_module

    return import_module("shardzoo.ops.linear_cross_entropy")


def draw(rows: int, features: int, words: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns hidden, weight, bias, and the gradients of the losses. Logits are of the order of 3."""
    generator = torch.Generator().manual_seed(rows + words)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(words, features) * 3 * features**-0.5
    tensors = [normal(rows, features), weight, normal(words)]
    return [*(tensor.to(dtype) for tensor in tensors), torch.rand(rows, generator=generator)]


def formula(
    tensors: Any,
    target: torch.Tensor,
    classes: int,
    softcap: float | None,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Returns the losses of hidden, weight and bias in fp64."""
    hidden, weight, bias = tensors
    logits = hidden @ weight.t()
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits[:, :classes]
    smoothing = settings.get("label_smoothing", 0.0)
    losses = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
    squares = logits.logsumexp(-1).square().masked_fill(target == -100, 0)
    return losses + settings.get("z_loss", 0.0) * squares


def compute(function: Any, tensors: list[Any], grad: torch.Tensor) -> list[torch.Tensor]:
    """Returns the losses and the gradients of the tensors."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    losses = function(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    return [losses.detach(), *torch.autograd.grad(losses, given, grad.to(losses.dtype))]


class Products(TorchDispatchMode):
    """Counts the operations of matrix products."""

    operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = args[-2:]
            self.operations += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def find_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "has_bias", "softcap", "settings"),
    [
        ((37, 19, 211), True, None, PLAIN),  # half of the blocks is kept
        ((16, 24, 230), False, None, ALL),  # nearly all are
        ((67, 5, 203), True, 6.0, ALL),  # hardly any is
        ((1, 8, 130), False, 6.0, PLAIN),
    ],
)
def test_blocks_match_fp64_as_well_as_whole_logits(
    precision, sizes, has_bias, softcap, settings, in_blocks
):
    rows, features, words = sizes
    classes = words - 9  # then padding, of which a whole block consists
    hidden, weight, bias, grad = draw(rows, features, words, precision)
    weight[classes:] = 30
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(classes, (rows,), generator=generator)
    target[rows // 2 + 1 :: 5] = -100
    tensors = [hidden, weight, bias if has_bias else None]

    def ours(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, bias, target, num_classes=classes, softcap=softcap, **settings
        )

    def exact(*three):
        return formula(three, target, classes, softcap, settings)

    expected = compute(exact, [None if t is None else t.double() for t in tensors], grad)
    whole = compute(ours, tensors, grad)
    in_blocks(5 * rows)
    found = compute(ours, tensors, grad)
    bounds = {torch.float32: 2e-6, torch.float16: 6e-3, torch.bfloat16: 3e-2}
    for ours_now, ours_whole, wanted in zip(found, whole, expected, strict=True):
        assert ours_now.dtype == ours_whole.dtype
        error = find_error(ours_now, wanted)
        assert error < bounds[precision]
        # Sums of rounded sums would be twice as wrong.
        assert error < 1.05 * find_error(ours_whole, wanted) + 2e-7
        if ours_now.dtype != torch.float32:
            assert (ours_now != ours_whole).float().mean() < 0.03


def test_blocks_of_two_ranks(in_blocks):
    """Of 107 columns each, blocks of 9 and a narrow last one; the second rank ends with padding."""
    hidden, weight, bias, grad = draw(12, 20, 214, torch.float32)
    weight[201:] = 30
    target = torch.randint(201, (12,), generator=torch.Generator().manual_seed(0))
    expected = compute(
        lambda *three: formula(three, target, 201, None, ALL),
        [hidden.double(), weight.double(), bias.double()],
        grad,
    )
    in_blocks(9 * 12)
    exchanged: list[torch.Tensor] = []

    def run(rank: int, gather: Any) -> list[torch.Tensor]:
        own = slice(107 * rank, 107 * rank + 107)

        def ours(hidden, weight, bias):
            return linear_cross_entropy(
                hidden,
                weight,
                bias,
                target,
                num_classes=201,
                first=107 * rank,
                gather=gather,
                **ALL,
            )

        return compute(ours, [hidden, weight[own], bias[own]], grad)

    def note(stats: torch.Tensor) -> torch.Tensor:
        exchanged.append(stats)
        return stats[None]

    for rank in range(2):
        run(rank, note)
    assert len(exchanged) == 2  # once a rank
    first, second = (run(rank, lambda _: torch.stack(exchanged)) for rank in range(2))
    found = [
        first[0],
        first[1] + second[1],
        torch.cat([first[2], second[2]]),
        torch.cat([first[3], second[3]]),
    ]
    for ours_now, wanted in zip(found, expected, strict=True):
        assert find_error(ours_now, wanted) < 2e-6


def test_sums_over_many_blocks_are_rounded_once(in_blocks):
    """Without the error of the logits: both ways multiply the same numbers, and differ by their sums alone."""
    hidden, weight, _, grad = draw(64, 32, 4000, torch.bfloat16)
    target = torch.randint(4000, (64,))

    def ours(hidden, weight):
        return linear_cross_entropy(hidden, weight, None, target, num_classes=4000)

    _, *whole = compute(ours, [hidden, weight], grad)
    in_blocks(64 * 20)
    _, *found = compute(ours, [hidden, weight], grad)
    for ours_now, ours_whole in zip(found, whole, strict=True):
        assert (ours_now != ours_whole).float().mean() < 0.02


@pytest.mark.parametrize("needs", [(True, False, True), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed(needs, in_blocks):
    hidden, weight, bias, grad = draw(9, 6, 50, torch.float32)
    target = torch.randint(50, (9,))

    def run() -> list[Any]:
        tensors = (hidden, weight, bias)
        leaves = [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        losses = linear_cross_entropy(*leaves, target, num_classes=50)
        losses.backward(grad)
        return [leaf.grad for leaf in leaves]

    whole = run()
    in_blocks(30)
    for found, expected in zip(run(), whole, strict=True):
        if expected is None:
            assert found is None
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_gradients_no_logits_are_kept(in_blocks):
    hidden, weight, bias, _ = draw(9, 6, 50, torch.float32)
    target = torch.randint(50, (9,))
    expected = linear_cross_entropy(hidden, weight, bias, target, num_classes=50)
    in_blocks(30)
    found = linear_cross_entropy(hidden, weight, bias, target, num_classes=50)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_kept_logits_are_replaced_behind_those_that_are_still_needed():
    code = module()
    seen = set()
    for rows in (1, 3, 8, 100, 129):
        for features in (1, 7, 8, 64, 300):
            for columns in (1, 5, 128, 1000, 1001):
                for width in (1, 5, 64, 500):
                    kept = code.count_kept_blocks(rows, columns, features, width)
                    elements = columns * features
                    start = code.find_kept_start(elements, kept * rows * width)
                    logits = [start + k * rows * width for k in range(kept + 1)]
                    assert start >= 0
                    assert kept * width <= columns
                    assert logits[-1] <= elements
                    for k in range(kept):
                        assert (k + 1) * width * features <= logits[k]
                    seen.add((kept > 0, kept == columns // width))
    assert len(seen) >= 3


def test_a_large_head_takes_three_and_a_half_products(monkeypatch):
    """8,192 tokens, 4,096 features and 131,072 words, of whose logits 15 of 32 blocks are kept; here an eighth.

    Tensors without data have no value for which a host could wait.
    """
    code = module()
    assert code.choose_columns(8192) == 4096
    assert code.count_kept_blocks(8192, 131072, 4096, 4096) == 15
    monkeypatch.setattr(code, "MAX_WHOLE_LOGITS", 1)
    monkeypatch.setattr(code, "BLOCK_LOGITS", 1 << 19)
    monkeypatch.setattr(code, "MIN_COLUMNS", 1)
    rows, features, words = 1024, 512, 16384
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    with Products() as products:
        hidden, weight = (
            torch.empty(size, features, device="meta", dtype=torch.bfloat16, requires_grad=True)
            for size in (rows, words)
        )
        target = torch.empty(rows, device="meta", dtype=torch.long)
        linear_cross_entropy(hidden, weight, None, target, num_classes=words).sum().backward()
    assert products.operations == (3 + 17 / 32) * 2 * rows * features * words
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert weight.grad.untyped_storage().nbytes() == 2 * weight.numel()
