"""Implements `shardzoo estimate`: whether a training run fits a device, without running it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.hub import find_config_folder
from ..files.strict_json import read_folder_json
from ..models import FAMILIES, find_config
from ..models.config import ModelConfig
from ..plan.remedies import Remedy, find_remedies
from ..trainer.estimate import (
    Estimate,
    Job,
    bubble,
    choose_blocks,
    estimate,
    estimate_stages,
    largest_micro_batch,
)
from ..trainer.estimate.tables import stage_rows, stage_table
from ..trainer.optimizers.registry import OptimizerName
from ..trainer.precisions import PrecisionName
from .console import run_and_report
from .help import HelpPage, show_help

GIB = 1 << 30
DOES_NOT_FIT = 1
MOST_REMEDIES = 8


@dataclass(frozen=True)
class EstimateArguments:
    """Estimates how much memory training takes on a device, and whether it fits.

    The exit code is 0 if it fits (or no --device-memory is given), 1 if not.
    """

    model: Annotated[str, tyro.conf.Positional]
    """A preset, a folder or file with a Hugging Face config.json, or a name on the Hub, of a family
    of the zoo or any other decoder."""
    device_memory: float | None = None
    """Memory of the device in GiB, as advertised: 24, 40, 80."""
    micro_batch_size: int = 1
    """Sequences in one forward pass of a rank."""
    length: int | None = None
    """Tokens in a sequence, or in an encoder-decoder's source; by default the model's maximum."""
    target_length: int | None = None
    """Tokens in an encoder-decoder's target; by default as many as in the source."""
    padded: bool = True
    """Whether batches have an attention mask."""
    accumulation_steps: int = 1
    """Micro-batches for one optimizer step."""
    tp: int = 1
    """Tensor-parallel size."""
    dp: int = 1
    """Data-parallel size."""
    pp: int = 1
    """Number of pipeline stages."""
    pipeline_partition: Literal["uniform", "parameters", "time"] = "uniform"
    """How blocks are dealt to the stages: equal numbers, or by parameters or measured time."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage; by default no DeepSpeed, or stage 1 under tensor parallelism."""
    sequence_parallel: bool = False
    """Also split norms, dropouts and residuals along the sequence."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: those of attention (selective), or of whole
    blocks (full).
    """
    precision: PrecisionName = "bf16"
    """Precision of parameters and activations; the optimizer keeps fp32 copies."""
    optimizer: OptimizerName = "adamw"
    freeze: tuple[Literal["embeddings", "encoder", "decoder"], ...] = ()
    """Parts that are not trained."""
    lora_rank: int = 0
    """Rank of LoRA weights, which alone are trained."""
    lora_target_modules: tuple[str, ...] = ()
    """transformers' names of the layers that get LoRA weights, or all-linear; by default peft's
    choice.
    """
    device: Literal["cuda", "cpu"] = "cuda"
    json: bool = False
    """Print JSON; sizes are in bytes."""

    def job(self, longest: int) -> Job:
        return Job(
            micro_batch_size=self.micro_batch_size,
            length=self.length or longest,
            target_length=self.target_length,
            padded=self.padded,
            accumulation_steps=self.accumulation_steps,
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            pipeline_parallel_size=self.pp,
            zero_stage=self.zero_stage,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            precision=self.precision,
            optimizer=self.optimizer,
            frozen=self.freeze,
            lora_rank=self.lora_rank,
            lora_target_modules="all-linear"
            if self.lora_target_modules == ("all-linear",)
            else self.lora_target_modules,
            device=self.device,
        )


def find_any_config(name: str) -> tuple[Any, int]:
    """Returns the configuration, of a family of the zoo or else transformers' own, and the longest
    sequence.
    """
    path = Path(find_config_folder(name))
    path = path / CONFIG if path.is_dir() else path
    values = read_folder_json(path.parent, path.name) or {}
    if isinstance(values.get("model_type"), str) and values["model_type"] not in FAMILIES:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        return config, getattr(config, "max_position_embeddings", None) or 2048
    config = find_config(name)
    return config, config.max_sequence_length


def result_of(found: Estimate, arguments: EstimateArguments, largest: int | None) -> dict[str, Any]:
    """Returns the values that `--json` prints: counts of parameters and sequences; all others are
    bytes.
    """
    peak = found.peak
    result: dict[str, Any] = {
        "model": arguments.model,
        "parameters_on_rank": found.parameters,
        "trained_parameters_on_rank": found.trained,
        "peak": {"at": peak.name, **peak.lines, "total": peak.total},
        "moments": {moment.name: moment.total for moment in found.moments},
    }
    if arguments.device_memory is not None:
        spare = round(arguments.device_memory * GIB) - peak.total
        result |= {"fits": spare >= 0, "spare": spare, "largest_micro_batch_size": largest}
    return result


def table_of(found: Estimate, arguments: EstimateArguments) -> Table:
    """Returns a table of the memory in use at the peak."""
    share = f"{found.parameters:,} parameters" + (
        " on a rank" if arguments.tp * arguments.pp > 1 else ""
    )
    trained = "" if found.trained == found.parameters else f", {found.trained:,} of them trained"
    table = Table(
        title=f"{arguments.model}: {share}{trained}",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column(f"at the peak, {found.peak.name}")
    table.add_column("GiB", justify="right")
    for name, value in found.peak.lines.items():
        table.add_row(name, f"{value / GIB:.2f}")
    table.add_section()
    table.add_row("total", f"{found.peak.total / GIB:.2f}", style="bold")
    return table


def stages_result(stages: Sequence[Estimate], job: Job) -> dict[str, Any]:
    """Returns the values of a pipeline that `--json` prints."""
    if job.pipeline_parallel_size == 1:
        return {}
    rows = [
        {
            "blocks": count,
            "parameters": found.parameters,
            "in_flight": flying,
            "peak": found.peak.total,
        }
        for count, found, flying in stage_rows(stages, job)
    ]
    return {"stages": rows, "bubble": bubble(len(stages), job.accumulation_steps)}


def verdict(found: Estimate, device_memory: float, largest: int, asked: int) -> Text:
    spare = device_memory - found.peak.total / GIB
    if spare >= 0:
        text = Text(
            f"fits {device_memory:g} GiB, with {spare:.2f} GiB to spare", style="bold green"
        )
    else:
        text = Text(
            f"does not fit {device_memory:g} GiB: {-spare:.2f} GiB are missing", style="bold red"
        )
    if largest:
        more = "" if largest == asked else f" (asked for: {asked})"
        return text + Text(
            f"; the largest micro-batch that fits is {largest}{more}", style="default not bold"
        )
    return text + Text("; no micro-batch fits", style="default not bold")


OPTIONS = {
    "accumulation_steps": "--accumulation-steps",
    "micro_batch_size": "--micro-batch-size",
    "optimizer": "--optimizer",
    "recompute": "--recompute",
    "sequence_parallel": "--sequence-parallel",
    "tensor_parallel_size": "--tp",
    "zero_stage": "--zero-stage",
}


def advice(found: Sequence[Remedy]) -> Table | Text:
    """Returns a table of what makes a run fit, as options of this command."""
    if not found:
        return Text(
            "No recomputation, ZeRO, micro-batch, tensor parallelism or Adafactor makes it fit; more devices may "
            "(--dp with --zero-stage, or --pp)"
        )
    title = "What makes it fit, by predicted device time for a sequence"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("options", "GiB", "device time"):
        table.add_column(name, justify="left" if name == "options" else "right")
    for remedy in found:
        words = [
            f"{OPTIONS[name]} {value}" if value is not True else OPTIONS[name]
            for name, value in remedy.changes.items()
        ]
        table.add_row(" ".join(words), f"{remedy.memory / GIB:.2f}", f"{remedy.cost - 1:+.0%}")
    return table


HELP = HelpPage(
    "shardzoo estimate",
    EstimateArguments,
    sections={
        "tp": "layout",
        "micro_batch_size": "batch",
        "recompute": "precision and memory",
        "freeze": "what is trained",
        "device_memory": "device",
        "device": "device",
    },
)


def main(argv: list[str]) -> int:
    """Runs the command. Returns 0 if the run fits, 1 if it does not, 2 after a user's error."""
    show_help(HELP, argv)
    arguments = tyro.cli(EstimateArguments, prog=HELP.program, args=argv)
    return run_and_report(lambda: run(arguments))


def run(arguments: EstimateArguments) -> int:
    """Estimates and prints. ValueError for a user's mistake."""
    memory = None if arguments.device_memory is None else arguments.device_memory * GIB
    if memory is not None and not memory > 0:
        raise ValueError(f"--device-memory must be above 0 GiB, not {arguments.device_memory:g}")
    config, longest = find_any_config(arguments.model)
    job = arguments.job(longest)
    if arguments.pp > 1:
        job = replace(
            job,
            pipeline_blocks=choose_blocks(config, arguments.pp, arguments.pipeline_partition, job),
        )
    stages = estimate_stages(config, job)
    found = max(stages, key=lambda stage: stage.peak.total)
    fits = True
    largest = None
    others = None
    if memory is not None:
        fits = found.peak.total <= memory
        largest = largest_micro_batch(
            lambda size: estimate(config, replace(job, micro_batch_size=size)).peak.total <= memory
        )
        others = (
            find_remedies(config, job, memory)
            if not fits and isinstance(config, ModelConfig)
            else None
        )
    if arguments.json:
        result = result_of(found, arguments, largest) | stages_result(stages, job)
        print(
            json.dumps(
                result
                | ({"remedies": [vars(one) for one in others]} if others is not None else {}),
                indent=2,
            )
        )
    else:
        show(found, stages, job, arguments, largest, others)
    return 0 if fits else DOES_NOT_FIT


def show(
    found: Estimate,
    stages: Sequence[Estimate],
    job: Job,
    arguments: EstimateArguments,
    largest: int | None,
    others: Sequence[Remedy] | None,
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(found, arguments))
    if arguments.pp > 1:
        console.print(stage_table(stages, job))
    if arguments.device_memory is not None and largest is not None:
        console.print(verdict(found, arguments.device_memory, largest, arguments.micro_batch_size))
    if others is not None:
        console.print(advice(others[:MOST_REMEDIES]))
