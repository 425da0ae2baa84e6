"""Measures the loss of a head, from the hidden states on: forward and backward, beside PyTorch's and Liger's.

    python benchmarks/gpu/linear_cross_entropy.py --device cuda --json FILE

The sizes are those for which Liger publishes figures on an H100, in bf16: 8,192 tokens of 4,096 features and 131,072
words, 50.4 ms with its CuTe kernel and 128.8 ms with PyTorch. The mean loss and the gradients of the hidden states and
of the weight are compared with PyTorch's before any side is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import save, table
from torch import Tensor
from torch.nn import functional as F

from shardzoo.ops.linear_cross_entropy import linear_cross_entropy

SIZES = (8192, 4096, 131072)  # tokens, features, words
TINY = (16, 32, 64)
REPETITIONS = 5
# Of the loss, and of the gradients as a share of the largest value, in bf16.
LOSS_TOLERANCE = 1e-3
GRAD_TOLERANCE = 2e-2
COLUMNS = ("contender", "ms", "peak GiB", "loss")
PUBLISHED = "published for an H100: Liger 50.4 ms, PyTorch 128.8"
GIB = 1 << 30
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss by this package."""
    losses = linear_cross_entropy(hidden, weight, None, target, num_classes=len(weight))
    return losses.sum() / len(target)


def by_pytorch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss by PyTorch, whose logits exist whole and in fp32 too."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def by_liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss by Liger's fused function."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    result = liger_fused_linear_cross_entropy(hidden, weight, target)
    return result[0] if isinstance(result, tuple) else result


def find_contenders(device: str) -> dict[str, Loss]:
    """Returns the functions to time, PyTorch's first."""
    contenders: dict[str, Loss] = {"PyTorch": by_pytorch, "shardzoo": by_ours}
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        contenders["Liger"] = by_liger
    return contenders


def run(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Returns the loss and the gradients of the hidden states and of the weight."""
    value = loss(hidden, weight, target)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def find_error(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str | None:
    """Returns why results are wrong, or None."""
    if not torch.isclose(results[0].float(), expected[0].float(), rtol=LOSS_TOLERANCE):
        return f"loss {results[0].item():.5f}, not {expected[0].item():.5f}"
    for name, value, wanted in zip(("hidden", "weight"), results[1:], expected[1:], strict=True):
        error = (value - wanted).abs().max() / wanted.abs().max()
        if not error <= GRAD_TOLERANCE:
            return f"the gradient of {name} is off by {error.item():.3g} of its largest value"
    return None


def measure(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor], device: str) -> tuple[float, str]:
    """Returns the median time of a forward and backward pass in milliseconds, and the peak memory."""
    seconds = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPETITIONS):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(loss, *tensors)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if device == "cuda" else "–"
    return 1000 * statistics.median(seconds), peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    tokens, features, words = TINY if options.tiny else SIZES
    generator = torch.Generator(options.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, device=options.device, generator=generator)
        return values.bfloat16().requires_grad_()

    hidden = draw(tokens, features)
    weight = draw(words, features)
    target = torch.randint(words, (tokens,), device=options.device, generator=generator)
    with torch.no_grad():
        weight.mul_(features**-0.5)
    tensors = (hidden, weight, target)
    title = f"Linear cross-entropy, bf16, {tokens:,} × {features:,} × {words:,}; {PUBLISHED}"
    rows: list[list[str]] = []
    expected: tuple[Tensor, ...] | None = None
    is_wrong = False
    for name, loss in find_contenders(options.device).items():
        try:
            results = run(loss, *tensors)
            expected = expected or results
            error = find_error(results, expected)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
        if error is None:
            milliseconds, peak = measure(loss, tensors, options.device)
            rows.append([name, f"{milliseconds:.1f}", peak, f"{results[0].item():.4f}"])
        else:
            rows.append([name, error, "", ""])
            is_wrong |= name == "shardzoo"
        print(*rows[-1], sep="  ", flush=True)
        save(options.json, [table(title, COLUMNS, rows)])
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
