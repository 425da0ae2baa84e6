"""Makes the tables and progress bars shown before and after a pretraining run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from ..models.sizes import full_size
from ..trainer.arguments.training_arguments import TrainingArguments
from ..trainer.engines.deepspeed_config import zero_stage
from ..trainer.launch.ranks import Ranks


def facts_table(title: str, facts: dict[str, str]) -> Table:
    """Returns a table with two columns: name and value."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def run_summary(
    *,
    model_name: str,
    model: nn.Module,
    ranks: Ranks,
    arguments: TrainingArguments,
    train_tokens: int,
    valid_tokens: int,
    sequence_length: int,
    unigram_entropy: float,
    first_step: int,
) -> Table:
    """Returns a table of the model, how it is split, the corpus and the planned steps."""
    full = sum(full_size(parameter) for parameter in model.parameters())
    on_rank = sum(parameter.numel() for parameter in model.parameters())
    stage = zero_stage(arguments) if arguments.env_type.startswith("deepspeed") else 0
    accumulation = arguments.accumulation_steps(ranks.dp_size)
    sequences = arguments.micro_batch_size * accumulation * ranks.dp_size
    train_steps = arguments.train_steps or 0
    steps = f"{train_steps:,}" + (f", resuming from step {first_step:,}" if first_step else "")
    return facts_table(
        "Run",
        {
            "model": f"{model_name}: {full:,} parameters, {on_rank:,} on this rank",
            "mesh": f"{ranks.tp_size} tensor-parallel x {ranks.dp_size} data-parallel = {ranks.world_size} processes",
            "precision": arguments.precision,
            "engine": arguments.env_type + (f", ZeRO stage {stage}" if stage else ""),
            "corpus": f"{train_tokens:,} tokens to train on, {valid_tokens:,} held out",
            "unigram entropy": f"{unigram_entropy:.3f} nats per token of the held-out text",
            "global batch": f"{sequences} sequences x {sequence_length} tokens = {sequences * sequence_length:,} "
            f"tokens ({accumulation} micro-batches of {arguments.micro_batch_size} a rank)",
            "steps": f"{steps} = {train_steps * sequences * sequence_length:,} tokens",
        },
    )


def run_results(
    *, folder: Path, loss: float, unigram_entropy: float, hf_loss: float, tensor_parallel_size: int, minutes: float
) -> Table:
    """Returns a table of a run's results and the paths of its files."""
    return facts_table(
        "Result",
        {
            "held-out loss": f"{loss:.4f} nats per token, {unigram_entropy - loss:.2f} below the unigram entropy "
            f"of the same text ({unigram_entropy:.3f})",
            "exported model": f"transformers' held-out loss {hf_loss:.6f}, native at TP={tensor_parallel_size} "
            f"{loss:.6f}, difference {abs(hf_loss - loss):.1e}",
            "time": f"{minutes:.1f} minutes",
            "loss curve": f"{folder}/loss.png",
            "TensorBoard": f"tensorboard --logdir {folder}/tensorboard",
            "checkpoints": f"{folder}/checkpoints",
            "Hugging Face folder": f'{folder}/hf  (AutoModelForCausalLM.from_pretrained("{folder}/hf"))',
        },
    )


@contextmanager
def corpus_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar for each stage of preparing a corpus, or a line for each without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TimeElapsedColumn())
    tasks = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage} …")
            progress.update(tasks[stage], completed=done, total=total)

        yield show
