"""Compares the predictions of `shardzoo plan` with published runs, and fits the rates to half of them.

    python benchmarks/published_runs.py [--fit] [--by-source]

published_runs.csv has one run in a line. Its sources:

- libai-benchmark-libai, libai-benchmark-megatron: samples per second of both frameworks on up to 32 V100,
  github.com/Oneflow-Inc/libai, docs/source/tutorials/get_started/Benchmark.md;
- narayanan-2021-table-1: arXiv:2104.04473, table 1, from the FLOP/s per GPU by the paper's equation 3; micro-batches
  and layers of a chunk from github.com/NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh;
- korthikanti-2022-table-5: arXiv:2205.05198, tables 3 and 5, with and without their two techniques;
- bloom-2022: github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/README.md;
- glm-130b-2022: arXiv:2210.02414, from 135 TFLOP/s per GPU, which count what is recomputed;
- llm-foundry-2023-a100, llm-foundry-2023-h100: tokens per second of MPT under FSDP with fused attention,
  github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md, bf16, 760M to 70B; sizes from its yamls folder.

Two more sources are compared and never fitted, because their models are of other shapes (`OTHERS`):

- llama-3-2024: arXiv:2407.21783, table 4, the 405B decoder on 8,192 and 16,384 H100, seconds from its 430 and 400
  TFLOP/s per GPU by 6 FLOPs for each parameter and token; one layer in a chunk of its schedule is assumed;
- libai-mt5-2022: the figures that LiBai's mT5 project prints for 1 and 8 A100 in TF32; its pipelines have one
  micro-batch.

LiBai's page does not name the network; its authors' other benchmarks (github.com/Oneflow-Inc/DLPerf) ran on V100 nodes
with one adapter of 100 Gb/s, which is assumed here. The rows of the papers' tables were compared with transcriptions by
others; GLM-130B's batch of 4,224 and its micro-batch of 1 are not confirmed.

Of every four runs the last two are held out of the fit. They are neighbors of fitted ones, so `--by-source` also holds
out one source after the other, and fits from starts that know nothing of it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from shardzoo.models.activations import Activations, BlockSpec, StackSpec
from shardzoo.plan import CLUSTERS, Cluster, Network, PlannedRun, Rates, StepTime, step_time
from shardzoo.plan.hardware import DEVICES

RUNS = Path(__file__).with_name("published_runs.csv")
WORST, MEDIAN = 0.35, 0.15
FITTED = ("compute", "attention", "memory", "link", "overlap")  # and the share that H100 sustain
STARTS = (  # a fit stops at the first minimum that it finds, so it is begun at each of these
    (0.6, 0.6, 0.7, 0.6, 0.5, 0.6),
    (0.9, 0.3, 0.5, 0.9, 0.1, 0.9),
    (0.5, 0.9, 0.9, 0.4, 0.9, 0.4),
)
# LiBai's page has two frameworks. The H100 runs are the only ones of their device, so they cannot be held out.
SOURCES = ("libai", "narayanan", "korthikanti", "bloom", "glm", "llm-foundry-2023-a100")
H100 = "h100"
Fit = tuple[Rates, float]


def llama_3(gpus: int, seconds: float) -> tuple[Network, PlannedRun, Cluster, float]:
    block = BlockSpec(
        hidden=16_384, heads=128, head_size=128, feed_forward=53_248, mlp_kept=2, attention_dropout=False, dropouts=0,
        statistics=1, causal=True, gated=True, key_value_heads=8,
    )  # fmt: skip
    model = Network.from_activations(
        Activations((StackSpec("", 126, block),)), 128_256, 405_853_388_800
    )
    layout = {"tensor": 8, "pipeline": 16, "chunks": 8, "sequence_parallel": True}
    return model, PlannedRun(gpus, 2048, 1, 8192, **layout), CLUSTERS[H100], seconds


def mt5(
    gpus: int, batch: int, tensor: int, pipeline: int, seconds: float
) -> tuple[Network, PlannedRun, Cluster, float]:
    block = BlockSpec(
        hidden=768, heads=12, head_size=64, feed_forward=2048, mlp_kept=2, attention_dropout=False, dropouts=0,
        statistics=1, bias=True, gated=True,
    )  # fmt: skip
    stacks = (
        StackSpec("encoder", 12, block),
        StackSpec("decoder", 12, replace(block, causal=True, cross=True), is_decoder=True),
    )
    usual = CLUSTERS["a100"]
    layout = {"tensor": tensor, "pipeline": pipeline, "fused_attention": False, "zero_stage": 0}
    return (
        Network.from_activations(Activations(stacks), 21_248, 230_817_792),
        PlannedRun(gpus, batch, 16, 512, 128, itemsize=4, gradient_itemsize=4, **layout),
        replace(usual, device=replace(usual.device, peak_fp32=usual.device.peak / 2)),  # TF32
        seconds,
    )


OTHERS = {
    "llama-3-2024": [llama_3(8192, 11.598), llama_3(16_384, 6.2339)],
    "libai-mt5-2022": [
        mt5(1, 16, 1, 1, 0.23),
        mt5(8, 128, 1, 1, 0.3),
        mt5(8, 16, 1, 8, 0.73),
        mt5(8, 32, 2, 2, 0.34),
    ],
}


def other_errors(source: str) -> list[float]:
    """Returns the relative errors of the runs of a source in `OTHERS`."""
    return [
        step_time(model, run, cluster).total / seconds - 1
        for model, run, cluster, seconds in OTHERS[source]
    ]


def published(path: Path = RUNS) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def network(row: dict[str, str]) -> Network:
    """Returns the model of a run. Megatron's and LiBai's blocks keep no keys for dropout, which time does not show."""
    hidden, heads, inner, layers = (
        int(row[name]) for name in ("hidden", "heads", "feed_forward", "layers")
    )
    gated = row["gated"] == "1"
    block = BlockSpec(
        hidden=hidden, heads=heads, head_size=hidden // heads, feed_forward=inner, mlp_kept=2,
        attention_dropout=True, dropouts=2, statistics=2, causal=row["model"] != "bert", gated=gated,
    )  # fmt: skip
    parameters = (
        layers * (4 * hidden**2 + (2 + gated) * hidden * inner) + int(row["vocabulary"]) * hidden
    )
    return Network.from_activations(
        Activations((StackSpec("", layers, block),)), int(row["vocabulary"]), parameters
    )


def run_of(row: dict[str, str]) -> PlannedRun:
    names = (
        "gpus",
        "global_batch",
        "micro_batch",
        "length",
        "tensor",
        "pipeline",
        "chunks",
        "gradient_itemsize",
    )
    return PlannedRun(
        **{name: int(row[name]) for name in names},
        recompute=row["recompute"],  # pyright: ignore[reportArgumentType]
        sequence_parallel=row["sequence_parallel"] == "1",
        fused_attention=row["source"].startswith("llm-foundry"),
        zero_stage=3
        if row["source"].startswith("llm-foundry")
        else int(row["source"] == "bloom-2022"),
    )


def error(row: dict[str, str], rates: Rates, sustained: float = DEVICES[H100].sustained) -> float:
    """Returns the relative error of the predicted step time: above 0 if it is too long."""
    return predicted(row, rates, sustained).total / float(row["seconds"]) - 1


def predicted(
    row: dict[str, str], rates: Rates, sustained: float = DEVICES[H100].sustained
) -> StepTime:
    cluster = replace(CLUSTERS[row["cluster"]], rates=rates)
    if row["cluster"] == H100:
        cluster = replace(cluster, device=replace(cluster.device, sustained=sustained))
    if row["source"].startswith("libai"):
        cluster = replace(cluster, adapters=1)
    return step_time(network(row), run_of(row), cluster)


def fit(rows: Sequence[dict[str, str]]) -> Fit:
    """Returns the rates with the smallest sum of squared errors among the minima that are found from `STARTS`."""
    from scipy.optimize import least_squares  # imported here because predictions do not need it

    def found_at(values: np.ndarray) -> Fit:
        *shares, sustained = map(float, values)
        found = dict(zip(FITTED, shares, strict=True))
        return Rates(**found, update=found["memory"]), sustained

    def errors(values: np.ndarray) -> list[float]:
        return [error(row, *found_at(values)) for row in rows]

    minima = [least_squares(errors, start, bounds=(0.01, 1.0), diff_step=1e-3) for start in STARTS]
    return found_at(min(minima, key=lambda minimum: minimum.cost).x)


def report(
    name: str, rows: Sequence[dict[str, str]], rates: Rates, sustained: float
) -> tuple[float, float]:
    """Prints and returns the median and the largest error of some runs."""
    errors = [abs(error(row, rates, sustained)) for row in rows]
    found = median(errors), max(errors)
    print(f"{name:28} {len(rows):3} runs, error: median {found[0]:6.1%}, worst {found[1]:6.1%}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the rates again to half of the runs"
    )
    parser.add_argument(
        "--by-source", action="store_true", help="hold out one source after the other"
    )
    parser.add_argument("--rows", action="store_true", help="print each run")
    arguments = parser.parse_args()
    rows, found = published(), (Rates(), DEVICES[H100].sustained)
    fitted = [row for number, row in enumerate(rows) if number % 4 < 2]
    held_out = [row for number, row in enumerate(rows) if number % 4 >= 2]
    if arguments.fit:
        found = fit(fitted)
    print(f"{found[0]}, H100 sustain {found[1]:.2f}")
    if arguments.rows:
        for row in rows:
            parts = predicted(row, *found)
            shares = " ".join(
                f"{name}={value / parts.total:.0%}" for name, value in parts.parts.items()
            )
            layout = f"t{row['tensor']} p{row['pipeline']} of {row['gpus']}"
            size = f"{row['model']}-{row['layers']}x{row['hidden']} {layout}"
            print(
                f"{row['source']:26} {size:30} {row['recompute']:9} {error(row, *found):+6.1%}  {shares}"
            )
    for source in dict.fromkeys(row["source"] for row in rows):
        report(source, [row for row in rows if row["source"] == source], *found)
    if arguments.by_source:
        for source in SOURCES:
            without = fit([row for row in rows if not row["source"].startswith(source)])
            report(
                f"{source}, held out",
                [row for row in rows if row["source"].startswith(source)],
                *without,
            )
    for source in OTHERS:
        print(f"{source}: {', '.join(f'{error:+.1%}' for error in other_errors(source))}")
    report("fitted", fitted, *found)
    middle, worst = report("held out", held_out, *found)
    return int(middle > MEDIAN or worst > WORST)


if __name__ == "__main__":
    raise SystemExit(main())
