"""Measures how costs grow with the work, fits their exponents, and compares them with the expected ones.

    python benchmarks/scaling.py [--parts train ranks communication steps saves convert prepare data start]
        [--json benchmarks/results/scaling_cpu.json] [--plots docs/curves/scaling.png]

A cost of c·n^a is a line with slope a in logarithms; the slope is fitted by least squares to the fastest of several
runs at each size. What is expected is computed at the same sizes and fitted likewise, because few costs are pure
powers: attention's share grows with the sequence, the blocks' share with the width. Fixed costs make a slope flatter.
The exit code is 1 if a cost grows faster than expected by more than 0.1 and `REASONS` does not say why.

Parts run one after the other, and one that is measured again replaces its figures in the JSON file. Training runs in
one thread, so that it takes one core to itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest import mock

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages

import calibration
import communication
import numpy as np
import torch
import torch.distributed as dist
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import convert
import data
import trainer
from shardzoo.data import (
    GPTDataset,
    IndexedDataset,
    PrepareOptions,
    ResumableLoader,
    Share,
    prepare_dataset,
)
from shardzoo.models import find_config, from_config, from_pretrained
from shardzoo.models.config import ModelConfig
from shardzoo.models.sizes import parameter_sizes
from shardzoo.mpu import ParallelMesh, collectives, dropout_state, shared_memory
from shardzoo.plan import PlannedRun, find_cluster, step_time
from shardzoo.plan.layouts import build_network
from shardzoo.trainer.estimate import Job, estimate
from shardzoo.trainer.estimate.estimate import FRAMEWORK

MARGIN = 0.1
REASONS = {
    "saving and loading over width: saving s": "GPT-2's files hold transposed matrices",
    "conversion over files: splitting s": "each file holds a piece of every tensor, at 0.25 ms",
    "training step over tensor-parallel ranks: seconds": "four ranks take turns on two cores",
    "training step over data-parallel ranks: seconds": "four ranks take turns on two cores",
}
"""Why a cost may grow faster than expected."""
SHOWN = {
    "training step over length": "tokens of a sequence",
    "training step over width": "width",
    "conversion over layers": "layers",
    "a corpus over tokens": "tokens of the corpus",
}
"""What is drawn, and what its sizes are."""
BASE = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "n_positions": 2048}
SHAPE = {"batch": 4, "length": 256, "accumulation": 1}
Values = dict[str, float]


@dataclass(frozen=True)
class Sweep:
    """What is measured at some sizes of one thing.

    Attributes:
        measure: From a size to figures by name: seconds, bytes.
        expected: From a size to what the same figures are proportional to.
    """

    name: str
    sizes: Sequence[int]
    measure: Callable[[int], Values]
    expected: Callable[[int], Values]


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    parts: tuple[str, ...] = (
        "train",
        "ranks",
        "communication",
        "steps",
        "saves",
        "convert",
        "prepare",
        "data",
        "start",
    )
    repeats: int = 3
    """Runs at each size; the fastest counts."""
    json: Path | None = None
    """File of the figures."""
    plots: Path | None = None
    """File of the plots."""


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-12)), 1)[0])


def fastest(repeats: int, work: Callable[[], object]) -> float:
    taken: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def train(arguments: Arguments) -> list[Sweep]:
    """Seconds and peak memory of a training step; expected are the time of `plan` and the memory of `estimate`."""
    sizes = {
        "batch": (1, 2, 4, 8, 16),
        "length": (128, 256, 512, 1024, 2048),
        "n_embd": (128, 256, 512, 1024),
        "n_layer": (2, 4, 8, 16),
        "vocab_size": (2048, 8192, 32_768, 131_072),
        "accumulation": (1, 2, 4, 8),
    }
    titles = {"n_embd": "width", "n_layer": "layers", "vocab_size": "vocabulary"}

    def sweep(name: str) -> Sweep:
        def settings(size: int) -> tuple[ModelConfig, dict[str, int]]:
            config = find_config("gpt2").with_changes(
                **BASE | ({name: size} if name in BASE else {})
            )
            return config, SHAPE | ({name: size} if name in SHAPE else {})

        return Sweep(
            f"training step over {titles.get(name, name)}",
            sizes[name],
            lambda size: measured_step(*settings(size), arguments.repeats),
            lambda size: expected_step(*settings(size)),
        )

    torch.set_num_threads(1)
    return [sweep(name) for name in sizes]


def measured_step(config: ModelConfig, shape: dict[str, int], repeats: int) -> Values:
    model: Any = from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    ids = torch.randint(config.vocab_size, (shape["batch"], shape["length"]))

    def step() -> None:
        for _ in range(shape["accumulation"]):
            dropout_state.set(1, 0)
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    # The profiler does not see the pool of large CPU outputs; it has no part in the peak, nor the kernel that uses it.
    without_pool = mock.patch(
        "shardzoo.ops.cpu.pool.recycled", lambda like, size: like.new_empty(size)
    )
    without_kernel = mock.patch.object(
        sys.modules["shardzoo.ops.cpu.products"], "_kernel_dtypes", tuple
    )
    with (
        without_pool,
        without_kernel,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step()
    found: Any = profiler.profiler
    events = sorted(
        (e for e in found.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    )
    peak = max(accumulate(event.nbytes() for event in events))
    kept = 12 * sum(parameter.numel() for parameter in model.parameters())  # weights and moments
    return {"seconds": fastest(repeats + 1, step), "peak bytes": peak + kept}


def expected_step(config: ModelConfig, shape: dict[str, int]) -> Values:
    count, batch = shape["accumulation"], shape["batch"]
    # Dropout in attention draws a mask for each score, which takes time like scores that are written to memory.
    run = PlannedRun(
        1,
        batch * count,
        batch,
        shape["length"],
        fused_attention=False,
        zero_stage=0,
        itemsize=4,
        gradient_itemsize=4,
    )
    job = Job(
        batch,
        shape["length"],
        padded=False,
        accumulation_steps=count,
        precision="fp32",
        device="cpu",
    )
    return {
        "seconds": step_time(build_network(config), run, find_cluster("cpu")).total,
        "peak bytes": estimate(config, job).peak.total - FRAMEWORK["cpu"],
    }


def over_ranks(arguments: Arguments) -> list[Sweep]:
    """Seconds of the trainer's step for the same work on more ranks of one thread each, which share the cores."""
    cores, os.environ["OMP_NUM_THREADS"] = os.cpu_count() or 1, "1"

    def row(axis: str, ranks: int) -> calibration.Row:
        batch, parts = {"tensor": (8, 1), "pipeline": (2, 4), "data": (8 // ranks, 1)}[axis]
        tensor, pipeline = (ranks if axis == name else 1 for name in ("tensor", "pipeline"))
        return calibration.Row("gpt2", BASE, batch, 256, 0, parts, tensor, pipeline, ranks)

    def expected(axis: str, ranks: int) -> Values:
        time = step_time(
            build_network(row(axis, 1).config), row(axis, ranks).run, find_cluster("cpu")
        ).total
        return {"seconds": time * max(ranks / cores, 1.0)}

    titles = {
        "tensor": "tensor-parallel ranks",
        "pipeline": "pipeline stages",
        "data": "data-parallel ranks",
    }
    return [
        Sweep(
            f"training step over {titles[axis]}",
            (1, 2, 4),
            lambda ranks, axis=axis: {"seconds": calibration.measured(row(axis, ranks))},
            lambda ranks, axis=axis: expected(axis, ranks),
        )
        for axis in titles
    ]


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank passes to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes += sum(
                tensor.numel() * tensor.element_size()
                for tensor in tensors
                if torch.is_tensor(tensor)
            )
        return func(*args, **(kwargs or {}))


def communicate(arguments: Arguments) -> list[Sweep]:
    """Bytes that a tensor-parallel rank passes to collectives in a step: four tensors of the stream for each block."""
    small = {
        "batch": 2,
        "length": 64,
        "n_embd": 96,
        "n_layer": 2,
        "n_head": 24,
        "vocab_size": 1536,
        "n_positions": 512,
    }
    sizes = {
        "ranks": (2, 4, 6, 8), "batch": (1, 2, 4, 8), "length": (32, 64, 128, 256), "n_embd": (96, 192, 384),
        "n_layer": (2, 4, 8), "vocab_size": (1536, 6144, 24_576),
    }  # fmt: skip
    grows = {"batch", "length", "n_embd", "n_layer"}
    titles = {
        "ranks": "tensor-parallel ranks",
        "n_embd": "width",
        "n_layer": "layers",
        "vocab_size": "vocabulary",
    }
    return [
        Sweep(
            f"communication over {titles.get(name, name)}",
            sizes[name],
            lambda size, name=name: {"bytes": sent_bytes(small | {name: size})},
            lambda size, name=name: {"bytes": size if name in grows else 1.0},
        )
        for name in sizes
    ]


def sent_bytes(settings: dict[str, int]) -> float:
    settings = dict(settings)
    ranks, shape = settings.pop("ranks", 2), (settings.pop("batch"), settings.pop("length"))
    with tempfile.NamedTemporaryFile() as file:
        communication.run(ranks, count_bytes, settings, shape, file.name)
        return float(Path(file.name).read_text())


def count_bytes(
    mesh: ParallelMesh, settings: dict[str, int], shape: tuple[int, int], path: str
) -> None:
    collectives._SMALL, shared_memory.find = 0, lambda tensor, group: None  # as between hosts
    model: Any = from_config(find_config("gpt2").with_changes(**settings), mesh).train()
    ids = torch.zeros(shape, dtype=torch.long)
    dropout_state.set(1, 0)
    with Sent() as sent:
        model(input_ids=ids, labels=ids).loss.backward()
    if dist.get_rank() == 0:
        Path(path).write_text(str(sent.bytes))


def steps(arguments: Arguments) -> list[Sweep]:
    """Seconds of the trainer's steps after the first two, with logging in each."""
    config = find_config("gpt2-quickstart").with_changes(
        n_embd=64, n_layer=1, n_head=4, vocab_size=512
    )

    def run(count: int) -> Values:
        with tempfile.TemporaryDirectory() as folder:
            samples = trainer.Samples(512, 32)
            return {
                "seconds": sum(
                    trainer.ours(from_config(config), samples, folder, train_steps=count).seconds
                )
            }

    torch.set_num_threads(1)
    return [Sweep("a run over its steps", (100, 400, 1600), run, lambda count: {"seconds": count})]


def saves(arguments: Arguments) -> list[Sweep]:
    """Seconds of `save_pretrained` and `from_pretrained`; expected are those of writing as many bytes to the disk."""

    def config(width: int) -> ModelConfig:
        return find_config("gpt2").with_changes(n_embd=width, n_layer=8, n_head=8)

    def run(width: int) -> Values:
        with tempfile.TemporaryDirectory() as folder:
            model: Any = from_config(config(width))
            written = fastest(arguments.repeats, lambda: model.save_pretrained(folder))
            return {
                "saving s": written,
                "loading s": fastest(arguments.repeats, lambda: from_pretrained(folder)),
            }

    def size(width: int) -> Values:
        nbytes = 4 * sum(size.full for size in parameter_sizes(config(width)))
        return {
            "saving s": fastest(arguments.repeats, lambda: write(bytes(nbytes))),
            "loading s": nbytes,
        }

    return [Sweep("saving and loading over width", (256, 512, 1024, 1536), run, size)]


def write(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def conversion(arguments: Arguments) -> list[Sweep]:
    """Seconds and memory of splitting a checkpoint over two ranks and merging it, each in a process of its own."""

    def run(layers: int) -> Values:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            convert.write_checkpoint(root / "source", *convert.gpt2_shapes(layers, 512))
            found: Values = {}
            for title, words in {
                "splitting": ("split", str(root / "source"), str(root / "two"), "--tp", "2"),
                "merging": ("merge", str(root / "two"), str(root / "one")),
            }.items():
                runs = []
                for _ in range(arguments.repeats):
                    rmtree(root / ("two" if title == "splitting" else "one"), ignore_errors=True)
                    runs.append(convert.convert(*words))
                found |= {
                    f"{title} s": min(r[0] for r in runs),
                    f"{title}, peak bytes": min(r[2] for r in runs),
                }
            return found

    def size(layers: int) -> Values:
        _, shapes = convert.gpt2_shapes(layers, 512)
        elements = sum(int(np.prod(shape)) for shape in shapes.values())
        return {name: elements if name.endswith(" s") else 1.0
                for name in ("splitting s", "splitting, peak bytes", "merging s", "merging, peak bytes")}  # fmt: skip

    def split(files: int) -> Values:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            convert.write_checkpoint(root / "source", *convert.gpt2_shapes(32, 512))
            words = (
                "split",
                str(root / "source"),
                str(root / "parts"),
                "--tp",
                str(files),
                "--overwrite",
            )
            runs = [convert.convert(*words) for _ in range(arguments.repeats)]
            return {
                "splitting s": min(r[0] for r in runs),
                "splitting, peak bytes": min(r[2] for r in runs),
            }

    return [
        Sweep("conversion over layers", (8, 16, 32, 64), run, size),
        Sweep(
            "conversion over files",
            (2, 4, 8),
            split,
            lambda _: dict.fromkeys(("splitting s", "splitting, peak bytes"), 1.0),
        ),
    ]


def prepare(arguments: Arguments) -> list[Sweep]:
    """Seconds of tokenizing a corpus, over its megabytes."""
    os.environ["RAYON_NUM_THREADS"] = "1"

    def run(megabytes: int) -> Values:
        with tempfile.TemporaryDirectory() as folder:
            corpus, tokenizer = data.make_corpus(Path(folder), megabytes)
            options = PrepareOptions(tokenizer)
            return {
                "seconds": fastest(
                    1, lambda: prepare_dataset(corpus, corpus.with_name("prepared"), options)
                )
            }

    return [
        Sweep(
            "preparation over megabytes of text",
            (6, 12, 24, 48),
            run,
            lambda size: {"seconds": size},
        )
    ]


DOCUMENT = 600  # tokens
SAMPLES = 200


def indexed(arguments: Arguments) -> list[Sweep]:
    """Seconds of opening a corpus, of its index of samples, of the first batch and of later ones, over its tokens."""

    def run(tokens: int) -> Values:
        with tempfile.TemporaryDirectory() as folder:
            prefix = make_tokens(Path(folder) / "made", tokens)
            found: Values = {
                "opening s": fastest(arguments.repeats, lambda: IndexedDataset(prefix))
            }
            corpus = IndexedDataset(prefix)
            found["index of samples s"] = fastest(
                arguments.repeats, lambda: GPTDataset(corpus, 1024)
            )
            samples = GPTDataset(corpus, 1024)
            found["first batch s"] = fastest(
                arguments.repeats, lambda: next(iter(ResumableLoader(samples, Share(4))))
            )
            batches = iter(ResumableLoader(samples, Share(4)))
            next(batches)
            found["batch s"] = (
                fastest(arguments.repeats, lambda: [next(batches) for _ in range(SAMPLES)])
                / SAMPLES
            )
            return found

    def expected(tokens: int) -> Values:
        return {
            "opening s": tokens,
            "index of samples s": tokens,
            "first batch s": tokens,
            "batch s": 1.0,
        }

    return [Sweep("a corpus over tokens", (10**6, 10**7, 10**8, 10**9), run, expected)]


def make_tokens(prefix: Path, tokens: int) -> Path:
    """Writes Megatron's .bin and .idx of documents of `DOCUMENT` tokens. The tokens stay in the page cache."""
    count = tokens // DOCUMENT
    with prefix.with_suffix(".bin").open("wb") as file:
        for start in range(0, count, 10**5):
            file.write(bytes(2 * DOCUMENT * min(10**5, count - start)))
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08")  # version 1, uint16
        file.write(count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little"))
        file.write(np.full(count, DOCUMENT, dtype="<i4").tobytes())
        file.write((2 * DOCUMENT * np.arange(count, dtype="<i8")).tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    return prefix


START = "from shardzoo.mpu import ParallelMesh; import torch.distributed as d; ParallelMesh({0}); d.barrier()"


def start(arguments: Arguments) -> list[Sweep]:
    """Seconds until new processes have imported the package and met; as much work for each, on the same cores."""

    def run(ranks: int) -> Values:
        words = [sys.executable, "-m", "torch.distributed.run", "--no-python", f"--nproc-per-node={ranks}",
                 "--standalone", sys.executable, "-c", START.format(ranks)]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return {
            "seconds": fastest(
                1, lambda: subprocess.run(words, check=True, capture_output=True, env=environment)
            )
        }

    cores = os.cpu_count() or 1
    return [
        Sweep(
            "starting over processes",
            (1, 2, 4, 8, 16),
            run,
            lambda ranks: {"seconds": max(ranks, cores)},
        )
    ]


PARTS = {
    "train": train, "ranks": over_ranks, "communication": communicate, "steps": steps, "saves": saves,
    "convert": conversion, "prepare": prepare, "data": indexed, "start": start,
}  # fmt: skip


def measure(sweep: Sweep) -> dict[str, Any]:
    """Returns each figure of a sweep with its values and exponents."""
    found = [sweep.measure(size) for size in sweep.sizes]
    wanted = [sweep.expected(size) for size in sweep.sizes]
    return {
        name: {
            "sizes": list(sweep.sizes),
            "values": [values[name] for values in found],
            "exponent": exponent(sweep.sizes, [values[name] for values in found]),
            "expected": exponent(sweep.sizes, [values[name] for values in wanted]),
        }
        for name in found[0]
    }


def table(results: dict[str, Any]) -> Table:
    shown = Table("cost", "sizes", "at the smallest", "at the largest", "exponent", "expected", "")
    for title, figures in results.items():
        for name, row in figures.items():
            over = (
                REASONS.get(f"{title}: {name}", "too fast")
                if row["exponent"] > row["expected"] + MARGIN
                else ""
            )
            ends = [f"{row['values'][place]:,.4g}" for place in (0, -1)]
            sizes = f"{row['sizes'][0]:,} to {row['sizes'][-1]:,}"
            shown.add_row(
                f"{title}: {name}",
                sizes,
                *ends,
                f"{row['exponent']:.2f}",
                f"{row['expected']:.2f}",
                over,
            )
    return shown


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the measured values of a few costs beside the expected slopes."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for axes, (title, sizes) in zip(panels, SHOWN.items(), strict=True):
        if title in results:
            draw_values(axes, title, sizes, results[title])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def draw_values(axes: Axes, title: str, unit: str, figures: dict[str, Any]) -> None:
    """Draws values relative to the smallest size as dots, and a line of the expected slope."""
    for name, row in figures.items():
        sizes = np.array(row["sizes"], float)
        scaled = np.array(row["values"]) / row["values"][0]
        quantity = name.removesuffix(" s")
        label = f"{quantity}: exponent {row['exponent']:.2f}, expected {row['expected']:.2f}"
        (dots,) = axes.plot(sizes, scaled, "o", label=label)
        middle = np.exp(np.log(scaled).mean() - row["expected"] * np.log(sizes).mean())
        axes.plot(sizes, middle * sizes ** row["expected"], "--", color=dots.get_color(), alpha=0.6)
    axes.set(title=title[0].upper() + title[1:], xlabel=unit, ylabel="relative to the smallest")
    axes.set(xscale="log", yscale="log")
    sizes = next(iter(figures.values()))["sizes"]
    axes.set_xticks(sizes, [readable(size) for size in sizes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high < 10 * low:  # too few powers of ten for a scale
        axes.set_yscale("linear")
    else:
        axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(top=high * (high / low) ** 0.35)  # room for the legend
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper left")


def readable(size: float) -> str:
    """Returns a size as it stands below an axis: 2,048, or 10 M."""
    return f"{size / 1e6:,g} M" if size >= 1e6 else f"{size:,g}"


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    kept = arguments.json is not None and arguments.json.exists()
    results: dict[str, Any] = (
        json.loads(arguments.json.read_text()) if arguments.json and kept else {}
    )
    for part in arguments.parts:
        for sweep in PARTS[part](arguments):
            started = time.perf_counter()
            results[sweep.name] = measure(sweep)
            print(f"{sweep.name}: {time.perf_counter() - started:.0f} s", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    Console(width=150).print(table(results))
    if arguments.plots:  # with `--parts` and no name, what the file holds is drawn anew
        draw(results, arguments.plots)
    rows = {
        f"{title}: {name}": row
        for title, figures in results.items()
        for name, row in figures.items()
    }
    return int(
        any(
            row["exponent"] > row["expected"] + MARGIN
            for name, row in rows.items()
            if name not in REASONS
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
