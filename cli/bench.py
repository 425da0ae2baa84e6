"""Implements `shardzoo bench kernels`: compares the fused operators with PyTorch on this machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich import box
from rich.table import Table

from ..files.object_store import check_local
from ..files.verbosity import is_quiet
from ..ops import current_choice
from ..ops.bench.cases import Case, cases
from ..ops.bench.measure import Result, measure
from ..trainer.logging.console import make_console
from .console import USAGE_ERROR, print_error, run_and_report
from .help import HelpPage, show_commands
from .parsing import list_fields, parse_words

# Operators whose sizes --shape gives.
SHAPED = ("layer_norm", "rms_norm", "bias_gelu", "geglu", "swiglu", "bias_dropout_residual")
COLUMNS = (
    "op",
    "dtype",
    "shape",
    "kernels",
    "ours ms",
    "spread",
    "eager ms",
    "x eager",
    "x compile",
    "copy GB/s",
    "fwd out",
    "of copy",
    "bwd out",
    "of copy",
    "both of copy",
    "x others",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Kernels:
    """Measure the fused kernels: correctness first, then time and bandwidth.

    If a result is wrong, this is reported, and no speed is printed for it.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto is a GPU if there is one."""
    op: tuple[str, ...] = ()
    """Operators to measure; all by default."""
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
    """Data types to measure."""
    repetitions: int = 15
    """Rounds; every implementation runs once in each."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    scale: float = 1.0
    """Factor of the leading dimension, for quick runs."""
    length: tuple[int, ...] = (0,)
    """Sequence lengths of attention, such as 256 512 1024 2048; 0 for 256 on a CPU, 2,048 on a GPU.
    """
    shape: tuple[str, ...] = ()
    """Rows and columns of norms, activations and residuals, such as 8192x768 65536x4096."""
    compile: bool = True
    """Also measure torch.compile of the PyTorch code."""
    json: Path | None = None
    """Write every figure to this file."""
    plot: Path | None = None
    """Draw the bandwidths to this file."""


HELP = HelpPage(
    "shardzoo bench kernels",
    Kernels,
    sections={
        "device": "what is measured",
        "repetitions": "how",
        "length": "what is measured",
        "json": "output",
    },
)


def main(argv: list[str]) -> int:
    """Runs `bench <what>`. Returns 0, 1 if a result is wrong, or 2 after a user's error."""
    show_commands("shardzoo bench", "Measures the fused kernels.", {"kernels": HELP}, argv)
    if argv[:1] != ["kernels"]:
        print_error(ValueError("name what to measure: shardzoo bench kernels"))
        return USAGE_ERROR
    options = parse_words(Kernels, argv[1:], HELP.program)
    return run_and_report(lambda: run(options), options=list_fields(Kernels))


def run(options: Kernels) -> int:
    """Measures, prints, and writes the requested files.

    Raises ValueError for an unknown operator.
    """
    for name in ("json", "plot"):
        if getattr(options, name):
            check_local(getattr(options, name), f"--{name}")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = choose_cases(options, device)
    names = list(dict.fromkeys(case.name for case in chosen))
    unknown = [name for name in options.op if name not in names]
    if unknown:
        raise ValueError(f"there is no operator {unknown[0]!r} to measure; use {', '.join(names)}")
    console = make_console()
    if options.op:
        chosen = [case for case in chosen if case.name in options.op]

    facts = describe_environment(device)
    results: list[Result] = []
    total = len(chosen) * len(options.dtype)
    for case in chosen:
        for dtype in options.dtype:
            doing = f"{len(results) + 1}/{total} {case.name} {dtype}"
            if not console.is_terminal and not is_quiet():
                print(doing, file=sys.stderr, flush=True)
            with console.status(doing):
                results.append(attempt(case, device, dtype, options))
            # Written after each case, so that an interrupted run leaves its results.
            if options.json:
                report = {"environment": facts, "results": [result.to_dict() for result in results]}
                options.json.write_text(json.dumps(report, indent=1) + "\n")

    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    console.print(build_table(results))
    wrong = [result for result in results if result.error]
    for result in wrong:
        state = build_row(result)[-1]
        console.print(
            f"{state}: {result.op} {result.dtype}: {result.error}", style="bold red", markup=False
        )
    for result in results:
        for name, reason in result.missing.items():
            console.print(
                f"not measured: {name} of {result.op} {result.dtype}: {reason}", markup=False
            )
    if options.plot:
        plot([result for result in results if not result.error], options.plot)
    return 1 if wrong else 0


def choose_cases(options: Kernels, device: str) -> list[Case]:
    """Returns the cases at their usual sizes, and then those at the other lengths and shapes that
    are asked for.
    """
    if not options.length:
        raise ValueError("--length needs at least one length, or 0 for the usual one")
    chosen = cases(device, options.scale, options.length[0])
    for length in options.length[1:]:
        for case in cases(device, options.scale, length):
            if case.name.startswith("attention"):
                chosen.append(case)
    shapes = [parse_shape(text) for text in options.shape]
    if not shapes:
        return chosen
    chosen = [case for case in chosen if case.name not in SHAPED]
    for shape in shapes:
        for case in cases(device, options.scale, shape=shape):
            if case.name in SHAPED:
                chosen.append(case)
    return chosen


def parse_shape(text: str) -> tuple[int, int]:
    """Returns rows and columns from a text such as 8192x768. Raises ValueError for another text."""
    rows, _, columns = text.partition("x")
    are_numbers = rows.isdecimal() and columns.isdecimal()
    if not are_numbers or int(rows) % 8 or int(rows) == 0 or int(columns) == 0:
        raise ValueError(
            f"--shape must be rows, a multiple of 8, and columns, such as 8192x768, not {text!r}"
        )
    return int(rows), int(columns)


def attempt(case: Case, device: str, dtype: str, options: Kernels) -> Result:
    """Measures one case. A failure, such as too little memory, is recorded and does not stop the
    other cases.
    """
    settings = {"repetitions": options.repetitions, "compiled": options.compile}
    try:
        return measure(case, device, DTYPES[dtype], **settings)
    except Exception as error:
        reason = f"failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Result(case.name, dtype, [], current_choice(), case.baseline, reason, {})
    finally:
        torch.compiler.reset()
        if device == "cuda":
            torch.cuda.empty_cache()


def describe_environment(device: str) -> dict[str, str]:
    """Returns the facts besides the code that the results depend on."""
    facts = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if device == "cuda":
        facts["GPU"] = torch.cuda.get_device_name()
    else:
        facts["processor"] = find_processor()
        facts["load"] = f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
        facts["huge pages"] = "on" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "off"
    return facts


def find_processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def build_table(results: list[Result]) -> Table:
    """Returns a table with a row per operator and dtype.

    Times include forward and backward unless stated otherwise.
    """
    table = Table(
        *COLUMNS,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="forward + backward",
        title_justify="left",
    )
    for result in results:
        table.add_row(*build_row(result))
    return table


def build_row(result: Result) -> list[str]:
    """Returns the table's cells for one result."""
    cells = [result.op, result.dtype, "x".join(map(str, result.shape)), result.variant]
    if result.error:
        state = "FAILED" if result.error.startswith("failed") else "WRONG"
        return [*cells, state]
    ours = result.timings["ours"]
    eager = result.timings["eager"]
    cells += [
        f"{ours.median:.2f}",
        f"{ours.spread:.2f}",
        f"{eager.median:.2f}",
        write_ratio(result.speedup("eager")),
        write_ratio(result.speedup("compile")),
        f"{result.bandwidth('copy'):.1f}",
    ]
    for name in ("ours forward out", "ours backward out"):
        cells += [f"{result.bandwidth(name):.1f}", f"{result.of_copy(name):.0%}"]
    others = [f"{name} {write_ratio(result.speedup(name))}" for name in result.rivals]
    return [*cells, f"{result.of_copy_both():.0%}", ", ".join(others)]


def write_ratio(ratio: float | None) -> str:
    """Returns a ratio as text, or a dash if nothing was measured."""
    return "-" if ratio is None else f"{ratio:.2f}"


def plot(results: list[Result], path: Path) -> None:
    """Plots a bar per implementation: GB/s of forward and backward, with the copy as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contenders: list[str] = []
    for name in ("eager", "compile", "ours"):
        if any(name in result.timings for result in results):
            contenders.append(name)
    figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(results), 4), layout="constrained")
    for offset, name in enumerate(contenders):
        heights: list[float] = []
        for result in results:
            heights.append(result.bandwidth(name) if name in result.timings else 0.0)
        places = [index + offset / (len(contenders) + 1) for index in range(len(results))]
        axes.bar(places, heights, width=0.8 / len(contenders), label=name)
    copies = [r.bandwidth("copy") for r in results]
    axes.plot(range(len(results)), copies, "k_", markersize=24, label="copy")
    axes.set_xticks(
        range(len(results)), [f"{r.op}\n{r.dtype}" for r in results], rotation=45, fontsize=7
    )
    axes.set_ylabel("GB/s, forward + backward")
    axes.legend()
    figure.savefig(path, dpi=150)
