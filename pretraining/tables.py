"""Makes the tables and progress bars shown before and after a pretraining run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..files.working_copies import name_urls
from ..models import family
from ..models.auto import build_on_meta
from ..models.config import ModelConfig
from ..models.sizes import compute_uneven_work, parameter_sizes
from ..trainer.engines.deepspeed_config import zero_stage
from ..trainer.environments import ENVIRONMENTS
from ..trainer.estimate import Job, choose_blocks, estimate_stages
from ..trainer.estimate.tables import stage_table
from ..trainer.launch.launch import count_processes
from ..trainer.launch.ranks import Ranks
from ..trainer.logging.descriptions import describe_engine, describe_mesh
from ..trainer.lora import check_lora_names
from ..trainer.run_folder import RunFolder
from .arguments import PretrainingArguments
from .inputs import Inputs

GIB = 1 << 30


def facts_table(title: str, facts: dict[str, str]) -> Table:
    """Returns a table with two columns: name and value."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def run_facts(
    arguments: PretrainingArguments,
    inputs: Inputs,
    config: ModelConfig,
    tp_size: int,
    dp_size: int,
    first_step: int = 0,
) -> dict[str, str]:
    """Returns what is known of a run before its corpus: the model, how it is split, the objective,
    the steps.
    """
    dealt = arguments.expert_parallel_size
    sizes = parameter_sizes(config, tp_size, dealt)
    full = sum(size.full for size in sizes)
    local = sum(size.local for size in sizes)
    padding = sum(size.padding for size in sizes)
    stages = arguments.pipeline_parallel_size
    held = f"{local:,} on a rank"
    if stages > 1:
        held = f"{local:,} on one rank of each stage together"
    if padding:
        held += f" with {padding:,} of the vocabulary's padding"
    accumulation = arguments.accumulation_steps(dp_size)
    sequences = arguments.global_batch(dp_size)
    steps = arguments.train_steps or 0
    tokens = sequences * inputs.tokens_per_sample
    objective = inputs.objective.name
    settings = ", ".join(f"{name}={value}" for name, value in asdict(inputs.objective).items())
    if settings:
        objective += f" ({settings})"
    resuming = f", last saved at step {first_step:,}" if first_step else ""
    return {
        "model": f"{arguments.model_name}: {config.architecture}, {full:,} parameters, {held}",
        "weights": f"those of {inputs.weights.name}" if inputs.weights else "new",
        **teacher_fact(arguments),
        "tokenizer": tokenizer_fact(inputs, config),
        "objective": objective,
        "mesh": describe_mesh(stages, dp_size, tp_size, arguments.context_parallel_size, dealt),
        "precision": arguments.precision,
        "engine": describe_engine(arguments),
        "global batch": f"{sequences} sequences x {inputs.tokens_per_sample} tokens = {tokens:,} "
        f"tokens ({accumulation} micro-batches of {arguments.micro_batch_size} a rank)",
        "steps": f"{steps:,} = {steps * tokens:,} tokens{resuming}",
    }


def teacher_fact(arguments: PretrainingArguments) -> dict[str, str]:
    """Returns what is learned of a teacher, if there is one."""
    if arguments.teacher_model is None:
        return {}
    ranks = arguments.teacher_parallel_size or arguments.model_parallel_size
    share = f"{arguments.teacher_weight:g} of the loss"
    heat = f"at temperature {arguments.teacher_temperature:g}"
    return {"teacher": f"{arguments.teacher_model} over {ranks} ranks, {share} {heat}"}


def tokenizer_fact(inputs: Inputs, config: ModelConfig) -> str:
    """Returns where the tokenizer is from, and whether the weights confirm it."""
    if inputs.tokenizer is None:
        kind = family(config.model_type).tokenizer_of(config)
        return f"{kind} of {config.vocab_size:,} tokens, trained on the corpus"
    if inputs.weights is not None and inputs.weights.vocabulary is None:
        return f"{inputs.tokenizer_name}, taken as that of the weights, which record none"
    return inputs.tokenizer_name


def run_plan(arguments: PretrainingArguments, inputs: Inputs) -> Group:
    """Returns tables of what a run would do.

    The size of its corpus is unknown before it is prepared.
    """
    tp_size = arguments.model_parallel_size
    processes = count_processes(arguments) * max(1, arguments.num_nodes)
    dp_size = processes // arguments.processes_of_a_replica * arguments.expert_parallel_size
    if inputs.tokenizer is None and arguments.vocab_size is not None:
        inputs = replace(inputs, config=inputs.config.with_changes(vocab_size=arguments.vocab_size))
    check_lora_names(inputs.config, arguments)
    facts = run_facts(arguments, inputs, inputs.config, tp_size, dp_size)
    config, job = estimated_job(arguments, inputs, dp_size)
    job = with_stages(arguments, config, job)
    stages = estimate_stages(config, job)
    peak = max((stage.peak for stage in stages), key=lambda peak: peak.total)
    facts["memory"] = f"about {peak.total / GIB:.2f} GiB on a rank, at the peak in {peak.name}"
    uneven = compute_uneven_work(build_on_meta(inputs.config, None), tp_size)
    if tp_size > 1 and uneven >= 0.01:
        facts["uneven work"] = (
            f"the busiest tensor-parallel rank computes {uneven:.1%} more than an even share"
        )
    facts["corpus"] = ", ".join(arguments.data) or "the Python standard library"
    usual_folder = Path("runs", f"{Path(arguments.model_name).name}-DATE")
    folder = RunFolder.named(arguments.output_dir or usual_folder)
    if arguments.overwrite and folder.own_files():
        facts["would delete"] = ", ".join(str(path) for path in folder.own_files())
    tables = [facts_table("Plan", facts | run_files(folder, inputs.config.architecture))]
    if len(stages) > 1:
        tables.append(stage_table(stages, job))
    return Group(*tables)


def with_stages(arguments: PretrainingArguments, config: ModelConfig, job: Job) -> Job:
    """Returns the job with the blocks of each pipeline stage, if there are several stages."""
    stages = arguments.pipeline_parallel_size
    if stages == 1:
        return job
    blocks = choose_blocks(config, stages, arguments.pipeline_partition, job)
    return replace(job, pipeline_blocks=blocks)


def estimated_job(
    arguments: PretrainingArguments, inputs: Inputs, dp_size: int
) -> tuple[ModelConfig, Job]:
    """Returns a configuration and a job whose memory is that of a run."""
    length, target = inputs.objective.lengths(inputs.sequence_length, inputs.target_length)
    config = inputs.config
    if length > config.max_sequence_length and family(config.model_type).kind != "encoder-decoder":
        # Samples with blanks are longer than their text.
        config = config.with_changes(max_position_embeddings=length)
    deepspeed = arguments.env_type.startswith("deepspeed")
    return config, Job(
        micro_batch_size=arguments.micro_batch_size,
        length=length,
        target_length=target,
        accumulation_steps=arguments.accumulation_steps(dp_size),
        tensor_parallel_size=arguments.model_parallel_size,
        data_parallel_size=dp_size // arguments.expert_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
        expert_parallel_size=arguments.expert_parallel_size,
        context_exchange=arguments.context_exchange,
        zero_stage=cast(Any, zero_stage(arguments)) if deepspeed else None,
        fsdp=ENVIRONMENTS[arguments.env_type].uses_fsdp,
        sequence_parallel=arguments.sequence_parallel,
        recompute=arguments.recompute,
        precision=arguments.precision,
        optimizer="adamw" if arguments.optimizer == "adam" else arguments.optimizer,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def corpus_facts(train_tokens: int | None, held_out_tokens: int, entropy: float) -> dict[str, str]:
    """Returns the sizes of the corpus, and the baseline of the loss.

    Args:
        train_tokens: None for a stream.
    """
    train = "a stream" if train_tokens is None else f"{train_tokens:,} tokens"
    return {
        "corpus": f"{train} to train on, {held_out_tokens:,} tokens held out",
        "target entropy": f"{entropy:.3f} nats per target of the held-out samples",
    }


def compared_loss(loss: float, entropy: float) -> str:
    """Returns a loss beside its baseline, the entropy of the same targets."""
    side = "below" if loss <= entropy else "above"
    distance = f"{abs(entropy - loss):.2f} {side}"
    return f"{loss:.4f} nats per target, {distance} the entropy of the same targets ({entropy:.3f})"


def run_results(
    *, loss: float, exported: float, entropy: float, loader: str, ranks: Ranks, minutes: float
) -> dict[str, str]:
    """Returns a run's results. `loader` is what evaluated the exported model."""
    return {
        "held-out loss": compared_loss(loss, entropy),
        "exported model": f"held-out loss {exported:.6f} by {loader}, {loss:.6f} native at "
        f"TP={ranks.tp_size}, difference {abs(exported - loss):.1e}",
        "training time": f"{minutes:.1f} minutes from the first step to the held-out loss",
    }


def step_time(records: Sequence[Mapping[str, float]], samples: int) -> dict[str, str]:
    """Returns the median time of the logged optimizer steps, each of so many samples."""
    logged = [record["train/seconds"] for record in records if "train/seconds" in record]
    if not logged:
        return {}
    seconds = median(logged)
    return {"time per step": f"{seconds:.3g} s/iter, {samples / seconds:.3g} samples/s (median)"}


def run_files(folder: RunFolder, architecture: str) -> dict[str, str]:
    """Returns the files that a run leaves; of a run in an object store their URLs."""
    files = {
        "loss curve": str(folder.loss_plot),
        "report": str(folder.report),
        "TensorBoard": f"tensorboard --logdir {folder.tensorboard}",
        "checkpoints": str(folder.checkpoints),
        "corpus, tokenizer": str(folder.data),
        "Hugging Face folder": f"{folder.hf} ({architecture}; README.md is its model card)",
    }
    return {name: name_urls(path) for name, path in files.items()}


@contextmanager
def corpus_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar for each stage of preparing a corpus, or a line for each without a
    terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    tasks = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage} …")
            progress.update(tasks[stage], completed=done, total=total)

        yield show
