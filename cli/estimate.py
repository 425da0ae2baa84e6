"""Implements `shardzoo estimate`: whether a training run fits a device, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.hub import find_config_folder
from ..files.strict_json import read_folder_json
from ..files.strict_yaml import read_strict_yaml
from ..models import FAMILIES, find_config
from ..models.config import ModelConfig
from ..models.parallel_config import ContextExchange, Recompute
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
from ..trainer.logging.console import make_console
from ..trainer.optimizers.registry import OptimizerName
from ..trainer.precisions import PrecisionName
from .arguments import given_value
from .console import run_and_report
from .help import HelpPage, show_help
from .namesakes import tell_of_namesake
from .parsing import parse_words
from .spellings import SHORT_NAMES, respell

GIB = 1 << 30
DOES_NOT_FIT = 1
MOST_REMEDIES = 8
# What a remedy changes -> the option.
OPTIONS = {
    "accumulation_steps": "--gradient-accumulation-steps",
    "fsdp": "--fsdp",
    "micro_batch_size": "--micro-batch-size",
    "optimizer": "--optimizer",
    "recompute": "--recompute",
    "sequence_parallel": "--sequence-parallel",
    "tensor_parallel_size": "--tp",
    "zero_stage": "--zero-stage",
}


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
    sequence_length: int | None = None
    """Tokens in a sequence, or in an encoder-decoder's source; by default the model's maximum."""
    target_length: int | None = None
    """Tokens in an encoder-decoder's target; by default as many as in the source."""
    padded: bool = True
    """Whether batches have an attention mask."""
    gradient_accumulation_steps: int = 1
    """Micro-batches for one optimizer step."""
    model_parallel_size: int = 1
    """Tensor-parallel size."""
    data_parallel_size: int = 1
    """Data-parallel size."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages."""
    context_parallel_size: int = 1
    """Number of processes that share each sequence."""
    expert_parallel_size: int = 1
    """Number of processes that the experts of a mixture are dealt over."""
    context_exchange: ContextExchange = "auto"
    """What they exchange in attention: heads, keys and values, or heads wherever possible."""
    pipeline_partition: Literal["uniform", "parameters", "time"] = "uniform"
    """How blocks are dealt to the stages: equal numbers, or by parameters or measured time."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage; by default no DeepSpeed, or stage 1 under tensor parallelism."""
    fsdp: bool = False
    """Split parameters, gradients and states by FSDP2, instead of ZeRO."""
    sequence_parallel: bool = False
    """Also split norms, dropouts and residuals along the sequence."""
    recompute: Recompute = "none"
    """Recompute activations in the backward pass: those of attention (selective), or of whole
    blocks (full), whose inputs a GPU moves to the host's memory until then (offload).
    """
    precision: PrecisionName = "fp32"
    """Precision of parameters and activations, by default the trainer's; the optimizer keeps fp32
    copies."""
    optimizer: OptimizerName = "adamw"
    optimizer_in_backward: bool = False
    """Update each parameter as soon as it has its gradient, and free the gradient."""
    freeze: tuple[Literal["embeddings", "encoder", "decoder"], ...] = ()
    """Parts that are not trained."""
    lora_rank: int = 0
    """Rank of LoRA weights, which alone are trained."""
    lora_target_modules: tuple[str, ...] = ()
    """transformers' names of the layers that get LoRA weights, or all-linear; by default peft's
    choice.
    """
    lora_target_parameters: tuple[str, ...] = ()
    """transformers' names of stacked experts that get LoRA weights."""
    base_precision: Literal["nf4", "int8", "fp8"] | None = None
    """How the linear layers under LoRA weights are packed, if they are."""
    teacher_model: str | None = None
    """A teacher that is distilled: like the model, of a family of the zoo."""
    teacher_parallel_size: int | None = None
    """Tensor-parallel size of the teacher; by default the model's."""
    device: Literal["cuda", "cpu"] = "cuda"
    json: bool = False
    """Print JSON; sizes are in bytes."""
    config: Path | None = None
    """YAML file with values for these arguments, or for those of `pretrain.py`, such as a recipe; the
    command line takes precedence."""

    def build_job(self, longest: int) -> Job:
        """Returns the run, of a model whose sequences have at most `longest` tokens."""
        lora_targets: tuple[str, ...] | str = self.lora_target_modules
        if lora_targets == ("all-linear",):
            lora_targets = "all-linear"
        return Job(
            micro_batch_size=self.micro_batch_size,
            length=self.sequence_length or longest,
            target_length=self.target_length,
            padded=self.padded,
            accumulation_steps=self.gradient_accumulation_steps,
            tensor_parallel_size=self.model_parallel_size,
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            context_exchange=self.context_exchange,
            zero_stage=self.zero_stage,
            fsdp=self.fsdp,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            precision=self.precision,
            optimizer=self.optimizer,
            optimizer_in_backward=self.optimizer_in_backward,
            frozen=self.freeze,
            lora_rank=self.lora_rank,
            lora_target_modules=lora_targets,
            lora_target_parameters=self.lora_target_parameters,
            base_precision=self.base_precision,
            teacher=None if self.teacher_model is None else find_config(self.teacher_model),
            teacher_parallel_size=self.teacher_parallel_size,
            device=self.device,
        )


# Options that the short page leaves out, so that it fits a screen.
RARE = ("lora_target_modules", "lora_target_parameters")

HELP = HelpPage(
    "shardzoo estimate",
    EstimateArguments,
    common=tuple(field.name for field in fields(EstimateArguments) if field.name not in RARE),
    sections={
        "model_parallel_size": "layout",
        "micro_batch_size": "batch",
        "recompute": "precision and memory",
        "freeze": "what is trained",
        "device_memory": "device and files",
        "device": "device and files",
    },
    names=SHORT_NAMES,
)


def main(argv: list[str]) -> int:
    """Runs the command. Returns 0 if the run fits, 1 if it does not, 2 after a user's error."""
    show_help(HELP, argv)
    names = [field.name for field in fields(EstimateArguments)]
    argv = respell(argv, names, positional="model")

    def work() -> int:
        config = given_value(argv, "config")
        values = read_run_file(Path(config), names) if config else {}
        # What the file says comes first, so that the command line replaces it.
        words = [*values, *argv]
        return run(parse_words(EstimateArguments, words, HELP.program))

    return run_and_report(work, options=names)


def read_run_file(path: Path, names: Sequence[str]) -> list[str]:
    """Returns the options of a YAML file that an estimate has too.

    A recipe of `pretrain.py` says more than an estimate needs; the rest is left out.
    """
    words: list[str] = []
    for key, value in (read_strict_yaml(path, "--config") or {}).items():
        name = str(key).replace("-", "_")
        if name == "model":
            words.insert(0, str(value))
        elif name in names and value is not None and not isinstance(value, (bool, dict, list)):
            words.append(f"--{name.replace('_', '-')}={value}")
        elif name in names and isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
    return words


def run(arguments: EstimateArguments) -> int:
    """Estimates and prints. ValueError for a user's mistake."""
    memory = None  # bytes
    if arguments.device_memory is not None:
        memory = arguments.device_memory * GIB
        if not memory > 0:
            raise ValueError(
                f"--device-memory must be above 0 GiB, not {arguments.device_memory:g}"
            )
    config, longest = find_any_config(arguments.model)
    job = arguments.build_job(longest)
    if arguments.pipeline_parallel_size > 1:
        stages = arguments.pipeline_parallel_size
        blocks = choose_blocks(config, stages, arguments.pipeline_partition, job)
        job = replace(job, pipeline_blocks=blocks)
    stages = estimate_stages(config, job)
    fullest = max(stages, key=lambda stage: stage.peak.total)

    fits = True
    largest = None
    remedies = None
    if memory is not None:
        fits = fullest.peak.total <= memory
        largest = largest_micro_batch(
            lambda size: estimate(config, replace(job, micro_batch_size=size)).peak.total <= memory
        )
        # The remedies are layouts of `shardzoo plan`, which splits no sequences.
        splits = job.context_parallel_size > 1
        if not fits and isinstance(config, ModelConfig) and not splits:
            remedies = find_remedies(config, job, memory)

    if arguments.json:
        result = list_results(fullest, arguments, largest) | list_stages(stages, job)
        if remedies is not None:
            result["remedies"] = [vars(remedy) for remedy in remedies]
        print(json.dumps(result, indent=2))
    else:
        console = make_console()
        console.print(describe_parameters(fullest, arguments, job), highlight=False)
        console.print(build_table(fullest))
        console.print(describe_settings(job), highlight=False)
        if arguments.pipeline_parallel_size > 1:
            console.print(stage_table(stages, job))
        if arguments.device_memory is not None and largest is not None:
            console.print(describe_fit(fullest, arguments, arguments.device_memory, largest))
        if remedies is not None:
            console.print(describe_remedies(remedies[:MOST_REMEDIES]))
    return 0 if fits else DOES_NOT_FIT


def find_any_config(name: str) -> tuple[Any, int]:
    """Returns the configuration, of a family of the zoo or else transformers' own, and the longest
    sequence.
    """
    path = Path(find_config_folder(name))
    if path.is_dir():
        path = path / CONFIG
    values = read_folder_json(path.parent, path.name) or {}
    if isinstance(values.get("model_type"), str) and values["model_type"] not in FAMILIES:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        return config, getattr(config, "max_position_embeddings", None) or 2048
    config = find_config(name)
    tell_of_namesake(name)
    return config, config.max_sequence_length


def list_results(
    found: Estimate, arguments: EstimateArguments, largest: int | None
) -> dict[str, Any]:
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


def list_stages(stages: Sequence[Estimate], job: Job) -> dict[str, Any]:
    """Returns the values of a pipeline that `--json` prints."""
    if job.pipeline_parallel_size == 1:
        return {}
    rows: list[dict[str, int]] = []
    for count, found, in_flight in stage_rows(stages, job):
        rows.append(
            {
                "blocks": count,
                "parameters": found.parameters,
                "in_flight": in_flight,
                "peak": found.peak.total,
            }
        )
    return {"stages": rows, "bubble": bubble(len(stages), job.accumulation_steps)}


def describe_settings(job: Job) -> str:
    """Returns what an estimate depends on beside the model, whether it was given or assumed."""
    parts = [
        f"micro-batch {job.micro_batch_size} x {job.length} tokens",
        job.precision,
        job.optimizer,
        f"recompute {job.recompute}",
        name_engine(job),
    ]
    sizes = {
        "tp": job.tensor_parallel_size,
        "pp": job.pipeline_parallel_size,
        "cp": job.context_parallel_size,
        "ep": job.expert_parallel_size,
        "dp": job.data_parallel_size,
    }
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    parts.append(layout or "one process")
    if job.target_length is not None:
        parts[0] += f" and {job.target_length} of the target"
    return "for " + ", ".join(parts)


def name_engine(job: Job) -> str:
    """Returns what runs the training step."""
    if job.fsdp:
        return "FSDP2"
    if job.stage is not None:
        return f"DeepSpeed with ZeRO stage {job.stage}"
    return "DDP" if job.data_parallel_size > 1 else "PyTorch"


def describe_parameters(found: Estimate, arguments: EstimateArguments, job: Job) -> str:
    """Says how many parameters a rank has, and how many of them are for no token."""
    text = f"{arguments.model}: {found.parameters:,} parameters"
    parts = job.tensor_parallel_size * job.pipeline_parallel_size * job.expert_parallel_size
    if parts > 1:
        text += " on a rank"
    if found.padding:
        share = "on average " if parts > 1 else ""
        text += f", {share}{found.padding:,} of them padding of the vocabulary"
    if found.trained != found.parameters:
        text += f", {found.trained:,} trained"
    return text


def build_table(found: Estimate) -> Table:
    """Returns a table of the memory in use at the peak."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(f"at the peak, {found.peak.name}")
    table.add_column("GiB", justify="right")
    for name, value in found.peak.lines.items():
        table.add_row(name, f"{value / GIB:.2f}")
    table.add_section()
    table.add_row("total", f"{found.peak.total / GIB:.2f}", style="bold")
    return table


def describe_fit(
    found: Estimate, arguments: EstimateArguments, device_memory: float, largest: int
) -> Text:
    """Says whether the run fits a device, and the largest micro-batch that does."""
    spare = device_memory - found.peak.total / GIB
    if spare >= 0:
        text = Text(
            f"fits {device_memory:g} GiB, with {spare:.2f} GiB to spare", style="bold green"
        )
    else:
        text = Text(
            f"does not fit {device_memory:g} GiB: {-spare:.2f} GiB are missing", style="bold red"
        )
    if largest == 0:
        more = "; no micro-batch fits"
    else:
        more = f"; the largest micro-batch that fits is {largest}"
        if largest != arguments.micro_batch_size:
            more += f" (asked for: {arguments.micro_batch_size})"
    return text + Text(more, style="default not bold")


def describe_remedies(remedies: Sequence[Remedy]) -> Table | Text:
    """Returns a table of what makes a run fit, as options of this command."""
    if not remedies:
        return Text(
            "No recomputation, ZeRO, FSDP, micro-batch, tensor parallelism or Adafactor makes it fit; "
            "more devices may (--dp with --zero-stage, or --pp)"
        )
    title = "What makes it fit, by predicted device time for a sequence"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("options")
    for name in ("GiB", "device time"):
        table.add_column(name, justify="right")
    for remedy in remedies:
        words: list[str] = []
        for name, value in remedy.changes.items():
            words.append(OPTIONS[name])
            if value is not True:
                words.append(str(value))
        table.add_row(" ".join(words), f"{remedy.memory / GIB:.2f}", f"{remedy.cost - 1:+.0%}")
    return table
