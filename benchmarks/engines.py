"""Compares a training step of FSDP2 with DistributedDataParallel's, in turns.

    python benchmarks/engines.py --ranks 2

Both engines train the same GPT-2 over the same samples, by the trainer's own engines and settings of memory: forward
and backward passes, exchange, clipping, AdamW. The command fails if their losses or gradient norms differ, and then
times nothing. Each round takes a step of each, and the ratio is that of the medians of all rounds; each rank has one
thread. The time of the processors is shown too: it is the steadier figure on a machine that does other work.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.distributed as dist
import tyro
from communication import run
from torch import Tensor

from shardzoo.models import find_config, from_config
from shardzoo.mpu import ParallelMesh, dropout_state
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.engines.engine import Engine
from shardzoo.trainer.engines.factory import make_engine, shard_model
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.engines.precision import prepare_model
from shardzoo.trainer.launch.environment import keep_freed_memory
from shardzoo.trainer.launch.ranks import Ranks

CHECKED = 3
"""Steps whose losses and norms must agree, which also warm up."""
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    ranks: int = 2
    model: str = "gpt2-quickstart"
    layers: int | None = None
    """By default the model's."""
    batch: int = 6
    """Sequences of a micro-batch of a rank."""
    length: int = 256
    micro_batches: int = 1
    precision: str = "fp32"
    rounds: int = 15
    required: float = 1.1
    """Fail if FSDP's step takes more than this many times DDP's."""


def build(env_type: str, mesh: ParallelMesh, arguments: Arguments) -> Engine:
    """Returns an engine as a run of the trainer has it."""
    chosen = TrainingArguments(
        env_type=env_type, precision=arguments.precision, lr=1e-4, clip_grad=1.0
    )
    ranks = Ranks(mesh)
    config = find_config(arguments.model)
    if arguments.layers is not None:
        config = config.with_changes(n_layer=arguments.layers)
    model = from_config(config, mesh).train()
    prepare_model(model, torch.device("cpu"), chosen, ranks)
    sharded = shard_model(model, chosen, ranks, None)
    optimizer = make_optimizer(model, chosen)
    return make_engine(model, optimizer, chosen, ranks, sharded)


def make_step(engine: Engine, mesh: ParallelMesh, arguments: Arguments) -> Callable[[], Tensor]:
    """Returns a function that takes a step, and returns its loss and gradient norm, [2]."""
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    vocabulary = engine.module.config.vocab_size
    shape = (arguments.micro_batches, arguments.batch, arguments.length)
    ids = torch.randint(3, vocabulary, shape, generator=generator)
    shares = arguments.micro_batches * mesh.dp_size

    def forward(k: int) -> Tensor:
        dropout_state.set(1, (k * mesh.dp_size + mesh.dp_rank) * arguments.batch)
        return engine.model(input_ids=ids[k], labels=ids[k]).loss / shares

    def step() -> Tensor:
        loss = engine.forward_backward(forward, arguments.micro_batches).sum()
        dist.all_reduce(loss)
        norm = engine.step().grad_norm
        assert norm is not None
        return torch.stack([loss.float(), norm.float()])

    return step


def measure(mesh: ParallelMesh, arguments: Arguments, report: Path) -> None:
    keep_freed_memory()
    data_mesh = ParallelMesh(1)
    steps = {}
    for env_type in ("pytorchDDP", "fsdp"):
        engine = build(env_type, data_mesh, arguments)
        steps[env_type] = make_step(engine, data_mesh, arguments)
    for _ in range(CHECKED):
        found = torch.stack([step() for step in steps.values()])
        torch.testing.assert_close(found[0], found[1], rtol=TOLERANCE[arguments.precision], atol=0)

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}  # seconds of this process
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            computed = time.process_time()
            step()
            busy[name].append(time.process_time() - computed)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    if dist.get_rank():
        return
    ratios = {}
    for kind, found in (("step", seconds), ("processor", busy)):
        medians = {name: statistics.median(values) for name, values in found.items()}
        ratios[kind] = medians["fsdp"] / medians["pytorchDDP"]
        for name, values in found.items():
            shown = f"{medians[name]:.3f} s ({min(values):.3f} … {max(values):.3f})"
            print(f"{kind:9} {name:10} {shown}")
        print(f"{kind:9} FSDP / DDP {ratios[kind]:.2f}", flush=True)
    report.write_text(str(ratios["step"]))


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "ratio"
        run(arguments.ranks, measure, arguments, report)
        ratio = float(report.read_text())
    return int(ratio > arguments.required)


if __name__ == "__main__":
    sys.exit(main())
