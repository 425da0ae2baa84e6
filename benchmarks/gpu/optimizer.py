"""Measures AdamW's step of bf16 parameters with fp32 master weights, from the gradients to the rounded parameters.

    python benchmarks/gpu/optimizer.py --device cuda --json FILE

The parameters are 24 matrices and 24 vectors, 302 million elements. Ours is one launch that clips, updates and rounds;
PyTorch's is what it takes with its fused AdamW: gradients copied to fp32, their norm, a factor, the step, a copy back.
The new parameters of both are compared before any is timed. GB/s are 30 bytes an element by the time, the least that a
step with 16-bit gradients moves. The time includes that of the norm, which also stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import save, table
from torch import Tensor, nn

from shardzoo import ops
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines.torch_engine import TorchEngine
from shardzoo.trainer.optimizers.adamw import AdamW

LAYERS = 24
SIZES = (4096, 3072)
TINY = (24, 16)
REPETITIONS = 9
BYTES = 30
TOLERANCE = 1.6e-2  # two places of bf16
COLUMNS = ("contender", "ms", "of which norm", "GB/s", "largest difference")


def make_engine(device: str, sizes: tuple[int, int]) -> TorchEngine:
    """Returns an engine with its own bf16 parameters, the same each time."""
    generator = torch.Generator(device).manual_seed(0)
    model = nn.Module()
    for layer in range(LAYERS):
        for name, shape in ((f"matrix{layer}", sizes), (f"vector{layer}", sizes[:1])):
            values = torch.randn(shape, generator=generator, device=device).bfloat16()
            model.register_parameter(name, nn.Parameter(values))
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    arguments = TrainingArguments(precision="bf16", clip_grad=1.0, save_optim=False)
    return TorchEngine(model, optimizer, arguments)


def give_gradients(engine: TorchEngine) -> None:
    """Gives each parameter a 16-bit gradient, as a backward pass does."""
    for number, parameter in enumerate(engine.module.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(number)
        parameter.grad = torch.randn(
            parameter.shape, generator=generator, device=parameter.device
        ).bfloat16()


def step(engine: TorchEngine) -> None:
    engine._masters.accumulate_grads()
    engine.step(torch.zeros((), device=next(engine.module.parameters()).device))


def measure(device: str, sizes: tuple[int, int], variant: str) -> tuple[list[Tensor], float, float]:
    """Returns the parameters after two steps, and the median times in milliseconds of a step and of
    the gradients' norm alone.
    """
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    with ops.kernels(variant):
        engine = make_engine(device, sizes)
        for _ in range(2):
            give_gradients(engine)
            step(engine)
        values = [parameter.detach().clone() for parameter in engine.module.parameters()]
        seconds: list[float] = []
        for _ in range(REPETITIONS):
            give_gradients(engine)
            wait()
            began = time.perf_counter()
            step(engine)
            wait()
            seconds.append(time.perf_counter() - began)
        give_gradients(engine)
        engine._masters.accumulate_grads()
        of_norm: list[float] = []
        for _ in range(REPETITIONS):
            wait()
            began = time.perf_counter()
            engine.clip()
            wait()
            of_norm.append(time.perf_counter() - began)
    return values, 1000 * statistics.median(seconds), 1000 * statistics.median(of_norm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    sizes = TINY if options.tiny else SIZES
    elements = LAYERS * (sizes[0] * sizes[1] + sizes[0])
    title = f"AdamW, {elements:,} parameters in bf16; {BYTES} bytes each at least"
    rows: list[list[str]] = []
    expected: list[Tensor] | None = None
    is_wrong = False
    for name, variant in (("PyTorch", "reference"), ("shardzoo", "auto")):
        try:
            values, milliseconds, of_norm = measure(options.device, sizes, variant)
            expected = expected or values
            pairs = zip(values, expected, strict=True)
            error = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
            speed = f"{BYTES * elements / milliseconds / 1e6:.0f}"
            rows.append([name, f"{milliseconds:.2f}", f"{of_norm:.2f}", speed, f"{error:.1e}"])
            if not error <= TOLERANCE:
                rows[-1][1:4] = ["WRONG", "", ""]
                is_wrong = True
        except Exception as failure:
            rows.append(
                [name, f"{type(failure).__name__}: {failure}".partition("\n")[0], "", "", ""]
            )
            is_wrong = True
        print(*rows[-1], sep="  ", flush=True)
        save(options.json, [table(title, COLUMNS, rows)])
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
