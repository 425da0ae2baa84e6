"""Implements `shardzoo plan`: the layouts of a run on a cluster, with the time that each will take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from ..files.object_store import check_local
from ..models import find_config
from ..models.config import ModelConfig
from ..plan.calibration import calibrate
from ..plan.hardware import FILES, Cluster, find_cluster
from ..plan.layouts import Plan, PlanRequest, build_network, find_plans, save_seconds
from ..plan.simulate import (
    Failures,
    Stragglers,
    forecast_run,
    save_interval,
    simulate_step,
    young_interval,
)
from ..trainer.logging.console import make_console
from ..trainer.optimizers.registry import OptimizerName
from ..trainer.precisions import PrecisionName
from .arguments import read_yaml
from .console import run_and_report
from .help import HelpPage, show_help
from .namesakes import tell_of_namesake
from .parsing import list_fields, parse_words
from .pretrain import RECIPES, PretrainCommand
from .spellings import respell

GIB = 1 << 30
DAY = 86400
NO_LAYOUT_FITS = 1
STEPS = 5  # simulated with stragglers, and averaged
COLUMNS = (
    "TP",
    "PP",
    "DP",
    "ZeRO",
    "recompute",
    "SP",
    "batch",
    "step s",
    "MFU",
    "tokens/s",
    "days",
    "GPU-hours",
    "GiB",
)


@dataclass(frozen=True)
class PlanArguments:
    """Lays a training run out on a cluster, and predicts what it takes.

    The exit code is 0 if a layout fits the devices, 1 if none does.
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    """A preset, or a folder or file with a Hugging Face config.json, of a family of the zoo."""
    gpus: int = 8
    """Devices."""
    device: str = "h100"
    """v100, a100-40gb, a100, h100, h200, b200, mi300x or cpu, or a YAML file with a device's
    figures.
    """
    tokens: float = 300e9
    """Tokens to train on; in an encoder-decoder, of its sources."""
    global_batch_size: int = 512
    """Sequences in one optimizer step."""
    sequence_length: int | None = None
    """Tokens in a sequence, or in an encoder-decoder's source; by default the model's maximum."""
    target_length: int | None = None
    """Tokens in an encoder-decoder's target; by default as many as in the source."""
    precision: PrecisionName | None = None
    """By default bf16, or fp32 on a CPU."""
    optimizer: OptimizerName = "adamw"
    peak: float | None = None
    """The device's 16-bit products, in TFLOP/s."""
    peak_fp32: float | None = None
    """The device's fp32 products, in TFLOP/s."""
    sustained: float | None = None
    """The share of its peak that the device keeps up under its power limit, relative to an A100."""
    memory: float | None = None
    """The device's memory, in GiB."""
    bandwidth: float | None = None
    """The device's memory bandwidth, in GB/s."""
    inside: str | None = None
    """The link inside a node, such as nvlink4, or its GB/s in one direction; by default the
    device's usual server's.
    """
    network: str | None = None
    """A network adapter, such as infiniband-hdr, or its GB/s; by default that of the usual server.
    """
    node_size: int | None = None
    """Devices in a node; by default 8."""
    adapters: int | None = None
    """Network adapters of a node; by default those of the usual server."""
    best: int = 10
    """How many layouts are shown."""
    calibrate: Path | None = None
    """Measure this machine, for about a minute, and write a file for `--device`. `--node-size`
    processes share it, by default one for each GPU, or one on a CPU. With a MODEL, plan with these
    figures."""
    write: Path | None = None
    """Write the first layout as a recipe for `pretrain.py --config`."""
    json: bool = False
    """Print JSON; times are in seconds and sizes in bytes."""
    simulate: bool = False
    """Run the first layout's step as events on every rank, and the whole run with failures."""
    mtbf: float = 50_000.0
    """Simulation: mean hours between failures of one device."""
    save_seconds: float | None = None
    """Simulation: seconds that a save costs; by default those of copying a rank's state to the
    host.
    """
    restart_seconds: float = 600.0
    """Simulation: seconds from a failure to the first repeated step."""
    slow_share: float = 0.0
    """Simulation: probability that a device is slow during a step."""
    slowdown: float = 1.2
    """Simulation: how many times as long a slow device needs."""
    jitter: float = 0.0
    """Simulation: relative deviation of the times of single passes, such as 0.05."""
    seed: int = 0
    """Simulation: of slow devices, jitter and failures."""

    def find_cluster(self) -> Cluster:
        """Returns nodes of the device, with the figures that were given."""
        return find_cluster(
            self.device,
            peak=self.peak,
            peak_fp32=self.peak_fp32,
            sustained=self.sustained,
            memory=self.memory,
            bandwidth=self.bandwidth,
            inside=self.inside,
            network=self.network,
            node_size=self.node_size,
            adapters=self.adapters,
        )

    def build_request(self, longest: int, cluster: Cluster) -> PlanRequest:
        """Returns what is asked for, of a model whose sequences have at most `longest` tokens."""
        on_cpu = cluster.device.name == "cpu"
        usual_precision: PrecisionName = "fp32" if on_cpu else "bf16"
        return PlanRequest(
            gpus=self.gpus,
            global_batch=self.global_batch_size,
            length=self.sequence_length or longest,
            target_length=self.target_length,
            precision=self.precision or usual_precision,
            optimizer=self.optimizer,
            device="cpu" if on_cpu else "cuda",
        )


HELP = HelpPage(
    "shardzoo plan",
    PlanArguments,
    required=("model",),
    sections={
        "gpus": "cluster",
        "tokens": "run",
        "peak": "cluster",
        "best": "result",
        "calibrate": "cluster",
        "write": "result",
        "mtbf": "simulation",
    },
    common=(
        "gpus",
        "device",
        "node_size",
        "network",
        "calibrate",
        "tokens",
        "global_batch_size",
        "length",
        "precision",
        "optimizer",
        "best",
        "write",
        "json",
        "simulate",
        "mtbf",
        "restart_seconds",
        "slow_share",
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command. Returns 0 if a layout fits, 1 if none does, 2 after a user's error."""
    show_help(HELP, argv)
    names = [field.name for field in fields(PlanArguments)]
    argv = respell(argv, names, positional="model")
    arguments = parse_words(PlanArguments, argv, HELP.program)
    return run_and_report(lambda: run(arguments), options=list_fields(PlanArguments))


def run(arguments: PlanArguments) -> int:
    """Plans, prints and writes. ValueError for a user's mistake."""
    if not arguments.tokens > 0 or arguments.best < 1:
        raise ValueError(
            f"tokens must be above 0 and best at least 1, "
            f"not {arguments.tokens:g} and {arguments.best}"
        )
    if arguments.seed < 0:
        raise ValueError(f"seed must be 0 or more, not {arguments.seed}")
    for name in ("calibrate", "write"):
        if getattr(arguments, name):
            check_local(getattr(arguments, name), f"--{name}")
    if arguments.calibrate:
        write_calibration(arguments, arguments.calibrate)
        if arguments.model is None:
            return 0
        arguments = replace(arguments, device=str(arguments.calibrate))
    if arguments.model is None:
        raise ValueError(
            "name a MODEL: a preset, or a folder or file with a Hugging Face config.json"
        )

    cluster = arguments.find_cluster()
    config = find_config(arguments.model)
    tell_of_namesake(arguments.model)
    request = arguments.build_request(config.max_sequence_length, cluster)
    plans = find_plans(config, request, cluster, best=arguments.best)
    rows = [list_results(plan, cluster, arguments.tokens) for plan in plans]
    if plans and arguments.simulate:
        rows[0]["simulated"] = simulate(plans[0], config, request, arguments)
    print_plans(plans, rows, arguments, cluster)
    if plans and arguments.write:
        values = build_recipe(plans[0], request, arguments)
        arguments.write.write_text(yaml.safe_dump(values, sort_keys=False))
    return 0 if plans else NO_LAYOUT_FITS


def write_calibration(arguments: PlanArguments, path: Path) -> None:
    """Measures this machine, and writes its figures.

    ValueError if another kind of file or more processes are asked.
    """
    if path.suffix not in FILES:
        raise ValueError(
            f"--calibrate writes a YAML file, so its name must end with {' or '.join(FILES)}, "
            f"not {path}"
        )
    with Console(stderr=True).status("training small models, to measure this machine"):
        figures = calibrate(arguments.node_size, arguments.precision)
    title = (
        f"# Measured by shardzoo plan --calibrate; the rates hold for {figures['node_size']} "
        f"processes on a node.\n"
    )
    path.write_text(title + yaml.safe_dump(figures, sort_keys=False))


# ---------------------------------------------------------------------------------------- printing


def list_results(plan: Plan, cluster: Cluster, tokens: float) -> dict[str, Any]:
    """Returns the values of a layout that `--json` prints."""
    run = plan.run
    step = plan.time.total
    rate = run.global_batch * run.length / step  # tokens per second
    return {
        "tensor_parallel_size": run.tensor,
        "pipeline_parallel_size": run.pipeline,
        "data_parallel_size": run.data,
        "context_parallel_size": run.context,
        "expert_parallel_size": run.expert,
        "zero_stage": None if run.fsdp else run.zero_stage,
        "fsdp": run.fsdp,
        "recompute": run.recompute,
        "sequence_parallel": run.sequence_parallel,
        "micro_batch_size": run.micro_batch,
        "step": step,
        "parts": plan.time.parts,
        "mfu": plan.mfu(cluster),
        "tokens_per_second": rate,
        "days": tokens / rate / DAY,
        "gpu_hours": tokens / rate / 3600 * run.gpus,
        "memory": plan.memory,
    }


def print_plans(
    plans: Sequence[Plan],
    rows: Sequence[dict[str, Any]],
    arguments: PlanArguments,
    cluster: Cluster,
) -> None:
    """Prints the layouts, or that none fits."""
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    console = make_console()
    if not plans:
        room = cluster.device.memory / GIB
        console.print(
            f"no layout of {arguments.gpus} x {arguments.device} with {room:.0f} GiB "
            f"holds {arguments.model}"
        )
        return
    console.print(build_table(rows, arguments))
    console.print(explain_choice(plans))
    if arguments.simulate:
        console.print(describe_simulation(rows[0]["simulated"], plans[0]))


def build_table(rows: Sequence[dict[str, Any]], arguments: PlanArguments) -> Table:
    """Returns a table with a row for each layout."""
    title = (
        f"{arguments.model} on {arguments.gpus} x {arguments.device}, {arguments.tokens:.3g} tokens"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    # Short sequences are never split, and only mixtures have experts.
    axes = {"cp": "context_parallel_size", "EP": "expert_parallel_size"}
    shown = {name: key for name, key in axes.items() if any(row[key] > 1 for row in rows)}
    for name in (*shown, *COLUMNS):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in shown.values()),
            str(row["tensor_parallel_size"]),
            str(row["pipeline_parallel_size"]),
            str(row["data_parallel_size"]),
            "fsdp" if row["fsdp"] else str(row["zero_stage"]),
            row["recompute"],
            "yes" if row["sequence_parallel"] else "no",
            str(row["micro_batch_size"]),
            f"{row['step']:.3g}",
            f"{row['mfu']:.1%}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['days']:,.1f}",
            f"{row['gpu_hours']:,.0f}",
            f"{row['memory'] / GIB:.1f}",
        )
    return table


def explain_choice(plans: Sequence[Plan]) -> str:
    """Says what the first layout's step is spent on, and where it gains most on the second."""
    first = plans[0].time
    parts = sorted(first.parts.items(), key=lambda part: -part[1])
    shares: list[str] = []
    for name, seconds in parts:
        if seconds:
            shares.append(f"{name.replace('_', ' ')} {seconds / first.total:.0%}")
    text = f"The first layout's step: {', '.join(shares)}."
    if len(plans) == 1:
        return text

    second = plans[1].time
    gains = {name: second.parts[name] - seconds for name, seconds in parts}
    largest = max(gains, key=lambda name: gains[name])
    if gains[largest] >= 0.001 * first.total:
        text += (
            f" Against the second it saves most in {largest.replace('_', ' ')} "
            f"({gains[largest]:.3g} s of a step)."
        )
    return text


# -------------------------------------------------------------------------------------- simulation


def simulate(
    plan: Plan, config: ModelConfig, request: PlanRequest, arguments: PlanArguments
) -> dict[str, Any]:
    """Returns what `--simulate` prints of a layout, in seconds: its step from events, and the run
    with failures.
    """
    network = build_network(config)
    cluster = arguments.find_cluster()
    stragglers = Stragglers(arguments.slow_share, arguments.slowdown, arguments.jitter)
    samples = 1
    if stragglers.jitter or stragglers.slow_share:
        samples = STEPS
    steps: list[float] = []
    for seed in range(arguments.seed, arguments.seed + samples):
        steps.append(simulate_step(network, plan.run, cluster, stragglers=stragglers, seed=seed))
    step = sum(steps) / samples

    save = arguments.save_seconds
    if save is None:
        save = save_seconds(config, plan.run, request)
    failures = Failures(arguments.mtbf * 3600, save, arguments.restart_seconds)
    devices = plan.run.gpus
    work = arguments.tokens / (plan.run.global_batch * plan.run.length) * step  # seconds
    forecast = forecast_run(failures, devices, work, seed=arguments.seed)
    return {
        "step_alike": simulate_step(network, plan.run, cluster),
        "step": step,
        "save": save,
        "intervals": {
            "simulated": forecast.interval,
            "young": young_interval(failures, devices),
            "daly": save_interval(failures, devices),
        },
        "failures": forecast.failures,
        "useful_share": work / forecast.seconds,
        "days": forecast.seconds / DAY,
        "days_95_percent": forecast.late / DAY,
    }


def describe_simulation(values: dict[str, Any], plan: Plan) -> str:
    """Says in words what `simulate` found."""
    intervals = ", ".join(
        f"{name} {seconds:,.0f} s" for name, seconds in values["intervals"].items()
    )
    return (
        f"Simulated on {plan.run.gpus:,} ranks: a step takes {values['step_alike']:.4g} s if all "
        f"are alike ({plan.time.total:.4g} s by the formulas), {values['step']:.4g} s with the "
        f"stragglers that were asked for. With a save of {values['save']:.3g} s, training between "
        f"saves should last ({intervals}). The run meets {values['failures']:,.3g} failures, "
        f"{values['useful_share']:.1%} of its time moves it forward, and it takes "
        f"{values['days']:,.1f} days; one run in twenty takes over "
        f"{values['days_95_percent']:,.1f}."
    )


# ------------------------------------------------------------------------------------------ recipe


def build_recipe(plan: Plan, request: PlanRequest, arguments: PlanArguments) -> dict[str, Any]:
    """Returns the arguments of `pretrain.py`: those of the model's own recipe, if it has one, with
    layout and nodes.
    """
    run = plan.run
    values: dict[str, Any] = {"model": arguments.model}
    for path in RECIPES.glob("*.yaml"):
        if path.stem == arguments.model:
            values = dict(read_yaml(PretrainCommand, path))
    for name in ("gradient_accumulation_steps", "zero_stage"):
        values.pop(name, None)
    if run.fsdp:
        engine: dict[str, Any] = {"env_type": "fsdp"}
    else:
        # The engine with an mpu refuses stage 3.
        env_type = "deepspeed" if run.zero_stage == 3 else "deepspeed+mpu"
        engine = {"env_type": env_type, "zero_stage": run.zero_stage}
    values |= {
        "model_parallel_size": run.tensor,
        "pipeline_parallel_size": run.pipeline,
        **engine,
        "sequence_parallel": run.sequence_parallel,
        "recompute": run.recompute,
        "micro_batch_size": run.micro_batch,
        "global_batch_size": run.global_batch,
        "sequence_length": run.length,
        "precision": request.precision,
        "optimizer": request.optimizer,
        "train_steps": ceil(arguments.tokens / (run.global_batch * run.length)),
    }
    # With these pretrain.py starts as many processes, or asks for a hostfile.
    nodes = ceil(run.gpus / arguments.find_cluster().node_size)
    if run.gpus % nodes == 0:
        values |= {"num_nodes": nodes, "num_gpus": run.gpus // nodes}
    if run.context > 1:
        values["context_parallel_size"] = run.context
    if run.expert > 1:
        values["expert_parallel_size"] = run.expert
    if run.target_length:
        values["target_length"] = run.target_length
    return values
