"""Compares the CPU kernel for large matrix products with PyTorch's products, in the shapes of a training step.

    python benchmarks/products.py --dtypes float32 bfloat16 --sizes 1024x768x3072 256x768x32128

A size is tokens x inputs x outputs of a linear layer. It has three products: its output, and the gradients of its input
and of its weight. Results are checked against fp64 before they are timed, in turns; rates are those of the medians. In
fp32, oneDNN is measured too, which PyTorch has beside its default library.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Huge pages speed up memory-bound work on a CPU, for both sides. torch reads this when it creates the first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardzoo.cli.bench import describe_environment
from shardzoo.ops import library, variants

ROUNDING = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    sizes: tuple[str, ...] = (
        "1024x768x768",
        "1024x768x3072",
        "1024x3072x768",
        "256x768x768",
        "256x768x32128",
    )
    """Tokens x inputs x outputs."""
    seconds: float = 0.5
    """About how long to repeat each product."""
    json: Path | None = None
    """Where to write the figures."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if (reason := variants.unavailable("cpp", "cpu")) is not None:
        raise SystemExit(f"there is no kernel to measure: {reason}")
    facts = describe_environment("cpu") | {"kernels": library.cpu_isa()}
    results = []
    for dtype in arguments.dtypes:
        for size in arguments.sizes:
            tokens, inputs, outputs = map(int, size.split("x"))
            for name, (a, b) in factors(tokens, inputs, outputs, getattr(torch, dtype)).items():
                check(a, b, dtype)
                results.append(
                    {"size": size, "dtype": dtype, "product": name}
                    | measure(a, b, arguments.seconds)
                )
    show(results, facts)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"environment": facts, "results": results}, indent=1) + "\n"
        )
    return 0


def factors(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the factors of the products of a linear layer, in the layouts of memory that it has."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    x, weight, grad = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return {"output": (x, weight.t()), "dx": (grad, weight), "dw": (grad.t(), x)}


def ours(a: Tensor, b: Tensor) -> Tensor:
    return library.call_compiled("matrix_product", a, b, None)


def check(a: Tensor, b: Tensor, dtype: str) -> None:
    """Raises SystemExit if some rows of the product are further from fp64's than their roundings."""
    rows = slice(0, 16)
    exact, sizes = a[rows].double() @ b.double(), a[rows].double().abs() @ b.double().abs()
    allowed = 1.01 * ROUNDING[dtype] * exact.abs() + a.shape[1] * ROUNDING["float32"] * sizes
    if not bool(((ours(a, b)[rows].double() - exact).abs() <= allowed).all()):
        raise SystemExit(f"the {dtype} product of {tuple(a.shape)} and {tuple(b.shape)} is wrong")


def measure(a: Tensor, b: Tensor, seconds: float) -> dict:
    """Returns the rates of the contenders, in GFLOP/s, and how many times as fast as the best of PyTorch ours is."""
    runs: dict[str, Callable[[], Tensor]] = {"ours": lambda: ours(a, b), "torch.mm": lambda: a @ b}
    if a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        runs["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(spent["ours"]) < 3:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            spent[name].append(time.perf_counter() - start)
    flops = 2e-9 * a.numel() * b.shape[1]
    rates = {name: flops / statistics.median(values) for name, values in spent.items()}
    return {
        "rates": rates,
        "ratio": rates["ours"] / max(rate for name, rate in rates.items() if name != "ours"),
    }


def show(results: list[dict], facts: dict[str, str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    table = Table(title="GFLOP/s", title_justify="left")
    for column in (
        "dtype",
        "tokens x inputs x outputs",
        "product",
        "ours",
        "torch.mm",
        "oneDNN",
        "ratio",
    ):
        table.add_column(column, justify="left" if column in ("dtype", "product") else "right")
    for result in results:
        rates = (result["rates"].get(name) for name in ("ours", "torch.mm", "oneDNN"))
        cells = ("" if rate is None else f"{rate:,.0f}" for rate in rates)
        table.add_row(
            result["dtype"], result["size"], result["product"], *cells, f"{result['ratio']:.2f}"
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
