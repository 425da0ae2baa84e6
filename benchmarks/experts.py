"""Compares training steps of a mixture of experts with those of transformers, and over two processes with one.

    python benchmarks/experts.py --required 2 --required-split 1.2

The model is a Mixtral of 8 experts and 4 layers of width 512, in fp32. All variants have the same weights and batch,
and step with clipping and a fused AdamW; their losses and gradient norms must agree, or no times are shown. They run in
turns, and ratios are those of medians. transformers runs with every combination of its attention (eager, sdpa) and its
experts (eager, which loops over them; grouped_mm), and compiled. Its batched_mm copies the matrices of its experts for
each token, 22 GB for each layer of this batch, and is left out.

The second part times one process of two threads beside two processes of one thread, with the experts split over the
tensor axis and dealt over the expert axis, and counts the bytes that the all-to-all sends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
import transformers
import tyro
from communication import run
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train_step import loss_and_norm, make_step, time_parts

import shardzoo
from shardzoo.cli.bench import describe_environment
from shardzoo.mpu import ParallelMesh, collectives, dropout_state
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines.factory import make_engine
from shardzoo.trainer.launch.environment import keep_freed_memory
from shardzoo.trainer.launch.ranks import Ranks
from shardzoo.trainer.optimizers.adamw import AdamW, clip_gradients

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
PARTS = ("transformers", "layouts")


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    batch_size: int = 4
    length: int = 256
    hidden_size: int = 512
    layers: int = 4
    experts: int = 8
    dtype: str = "float32"
    rounds: int = 7
    rest: float = 0.0
    """Seconds of rest before each step of the second part. At real-time priority Linux stops a processor for 50 ms of
    each second that is busy throughout; 0.4 prevents this."""
    compiled: bool = True
    """Whether to measure the compiled variants too."""
    parts: tuple[str, ...] = PARTS
    """Which of the two comparisons to run."""
    required: float = 0.0
    """Fail if native is not this many times as fast as the best of transformers."""
    required_split: float = 10.0
    """Fail if two processes take more than this many times as long as one."""
    json: Path | None = None
    """Where to write the figures."""


def make_reference(arguments: Arguments) -> nn.Module:
    """Returns transformers' Mixtral with random weights, with the proportions of Mixtral 8x7B."""
    hidden = arguments.hidden_size
    config = transformers.MixtralConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        num_local_experts=arguments.experts,
        max_position_embeddings=4096,
        sliding_window=None,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


def make_batch(arguments: Arguments) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.batch_size, arguments.length)
    ids = torch.randint(5, 32000, shape, generator=generator)
    return {"input_ids": ids, "labels": ids}


def make_variants(folder: str, arguments: Arguments) -> dict[str, nn.Module]:
    dtype = getattr(torch, arguments.dtype)
    variants: dict[str, nn.Module] = {}
    for attention in ("eager", "sdpa"):
        for experts in ("eager", "grouped_mm"):
            model = transformers.MixtralForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, experts_implementation=experts
            )
            variants[f"hf {attention}, {experts} experts"] = model.train()
    variants["native"] = shardzoo.from_pretrained(folder, dtype=dtype).train()
    if not arguments.compiled:
        return variants
    for experts in ("eager", "grouped_mm"):
        model = transformers.MixtralForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", experts_implementation=experts
        ).train()
        model.forward = torch.compile(model.forward)
        variants[f"hf sdpa, {experts} experts, compiled"] = model
    own = shardzoo.from_pretrained(folder, dtype=dtype).train()
    for name, module in own.named_modules():
        if name.rpartition(".")[0].endswith("blocks"):
            module.compile()
    variants["native, compiled blocks"] = own
    return variants


def compare_with_transformers(arguments: Arguments) -> dict[str, Any]:
    """Checks all variants of one process, then times them in turns."""
    batch = make_batch(arguments)
    reference = make_reference(arguments)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        variants = make_variants(folder, arguments)
    parameters = sum(parameter.numel() for parameter in reference.parameters())
    del reference
    facts = {name: loss_and_norm(model, batch) for name, model in variants.items()}
    check(facts, arguments.dtype)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    steps = {name: make_step(model, batch) for name, model in variants.items()}
    for step in steps.values():
        step()
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rival = min((name for name in medians if name.startswith("hf")), key=medians.__getitem__)
    own = min((name for name in medians if not name.startswith("hf")), key=medians.__getitem__)
    title = f"Mixtral, {parameters / 1e6:.0f}M parameters, {arguments.dtype}, {batch['input_ids'].numel()} tokens"
    show(title, seconds, medians[rival])
    ratio = medians[rival] / medians[own]
    shares = time_parts(steps["native"], "cpu")
    listed = ", ".join(f"{part} {share:.1%}" for part, share in shares.items())
    Console().print(
        f"{own} is {ratio:.2f}x the best of transformers ({rival}). Shares of native's step: {listed}\n"
    )
    return {"seconds": seconds, "best": rival, "ratio": ratio, "shares": shares}


def check(facts: dict[str, tuple[float, float]], dtype: str) -> None:
    """Raises RuntimeError unless all losses and gradient norms agree with those of the first variant."""
    first_loss, first_norm = next(iter(facts.values()))
    for name, (loss, norm) in facts.items():
        if (
            abs(loss / first_loss - 1) > LOSS_TOLERANCE[dtype]
            or abs(norm / first_norm - 1) > NORM_TOLERANCE[dtype]
        ):
            raise RuntimeError(f"{name} differs: {facts}")


def show(title: str, seconds: dict[str, list[float]], reference: float) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("variant", "median s", "min … max", "ratio"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} … {max(values):.3f}"
        table.add_row(name, f"{median:.3f}", spread, f"{median / reference:.2f}")
    Console().print(table)


# The second part: layouts.

Step = Callable[[], Tensor]


def make_plain_step(model: nn.Module, mesh: ParallelMesh | None, batch: dict[str, Tensor]) -> Step:
    """Returns a step of one process, or of tensor-parallel ranks, which returns loss and norm, [2]."""
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=0.0, fused=True)

    def step() -> Tensor:
        dropout_state.set(1, 0)
        loss = model(**batch).loss
        loss.backward()
        norm = clip_gradients(parameters, 1.0, optimizer, mesh)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.detach().float(), norm.float()])

    return step


def make_dealt_step(model: nn.Module, mesh: ParallelMesh, batch: dict[str, Tensor]) -> Step:
    """Returns a step of the trainer's engine over expert-parallel ranks, which have a part of the
    samples each.
    """
    chosen = TrainingArguments(env_type="pytorchDDP", precision="fp32", lr=1e-4, clip_grad=1.0)
    ranks = Ranks(mesh)
    optimizer = AdamW(list(model.parameters()), lr=0.0, fused=True)
    engine = make_engine(model, optimizer, chosen, ranks, None)
    each = len(batch["input_ids"]) // ranks.dp_size
    own = {name: value[ranks.dp_rank * each :][:each] for name, value in batch.items()}

    def step() -> Tensor:
        dropout_state.set(1, ranks.dp_rank * each)
        loss = engine.forward_backward(lambda k: engine.model(**own).loss / ranks.dp_size, 1).sum()
        dist.all_reduce(loss)
        norm = engine.step().grad_norm
        assert norm is not None
        return torch.stack([loss.float(), norm.float()])

    return step


def count_bytes(step: Step) -> tuple[list[int], int]:
    """Returns the bytes that this rank sends to the others in the exchanges of a step, and the rows
    that stay on it.
    """
    sent: list[int] = []
    stays: list[int] = []
    exchange = collectives.all_to_all_rows

    def count(
        rows: Tensor, to: list[int], received: list[int], group: Any, longest: int | None
    ) -> Tensor:
        row = rows[:1].numel() * rows.itemsize
        sent.append((sum(to) - to[group.rank()]) * row)
        stays.append(to[group.rank()] * row)
        return exchange(rows, to, received, group, longest)

    collectives.all_to_all_rows = count
    try:
        step()
    finally:
        collectives.all_to_all_rows = exchange
    return sent, sum(stays)


def measure_layouts(mesh: ParallelMesh, arguments: Arguments, folder: str, report: str) -> None:
    """Times one process beside two; runs on both."""
    keep_freed_memory()
    expert_mesh = ParallelMesh(expert_parallel_size=2)
    if mesh.rank == 0:
        make_reference(arguments).save_pretrained(folder, is_main_process=True)
    dist.barrier()
    batch = make_batch(arguments)
    steps: dict[str, Step] = {}
    whole = None
    if mesh.rank == 0:
        whole = make_plain_step(shardzoo.from_pretrained(folder).train(), None, batch)
    steps["one process"] = whole or (lambda: torch.zeros(2))
    split = shardzoo.from_pretrained(folder, mesh).train()
    steps["tensor 2"] = make_plain_step(split, mesh, batch)
    dealt = shardzoo.from_pretrained(folder, expert_mesh).train()
    steps["expert 2"] = make_dealt_step(dealt, expert_mesh, batch)

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    facts: dict[str, tuple[float, float]] = {}
    for turn in range(arguments.rounds + 1):  # the first is not counted
        for name, step in steps.items():
            time.sleep(arguments.rest)
            dist.barrier()
            torch.set_num_threads(2 if name == "one process" else 1)
            started = time.perf_counter()
            loss, norm = step().tolist()
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - started)
            facts[name] = (loss, norm)
    sent, stays = count_bytes(steps["expert 2"])
    totals = torch.tensor([sum(sent), stays])
    dist.all_reduce(totals)
    if mesh.rank:
        return
    check(facts, "float32")
    one = statistics.median(seconds["one process"])
    show("a training step", seconds, one)
    # docs/experts.md: with experts that are equally popular, for each rank, layer and step.
    tokens = arguments.batch_size // 2 * arguments.length
    formula = 4 * tokens * 2 // 2 * arguments.hidden_size * 4 * arguments.layers * 2
    total, stay = totals.tolist()
    Console().print(
        f"all-to-all: {total:,} bytes sent by both ranks in a step in {len(sent)} exchanges each, "
        f"{stay:,} stay; formula for equally popular experts: {formula:,} of "
        f"{2 * formula:,} ({total / formula:.3f})\n"
    )
    ratios = {name: statistics.median(values) / one for name, values in seconds.items()}
    found = {"seconds": seconds, "ratios": ratios, "sent": total, "stays": stay, "formula": formula}
    Path(report).write_text(json.dumps(found))


def compare_layouts(arguments: Arguments) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run(2, measure_layouts, arguments, folder, str(report))
        return json.loads(report.read_text())


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts = describe_environment("cpu") | {"transformers": transformers.__version__}
    found: dict[str, Any] = {"environment": facts}
    failed = False
    # The ranks are forked, which must happen before this process has started threads.
    if "layouts" in arguments.parts:
        found["layouts"] = compare_layouts(arguments)
        ratios = found["layouts"]["ratios"]
        # Each pair has travelled, or stayed.
        both = found["layouts"]["sent"] + found["layouts"]["stays"]
        failed |= both != 2 * found["layouts"]["formula"]
        failed |= max(ratios["tensor 2"], ratios["expert 2"]) > arguments.required_split
    if "transformers" in arguments.parts:
        found["transformers"] = compare_with_transformers(arguments)
        failed |= found["transformers"]["ratio"] < arguments.required
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
