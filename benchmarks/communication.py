"""Compares collectives of CPU tensors through shared memory with gloo's, and what they make of a training step.

    python benchmarks/communication.py [--ranks 2 4] [--steps] [--kills 200]

The first table has each collective of `shardzoo.mpu.collectives` over ranks on this machine, by size, in turns. Every
result is compared with the exact one first. `--steps` times training steps of a T5 and a BERT in one process with two
threads, and over two ranks with one thread each, through shared memory, through gloo, and with DeepSpeed's AutoTP over
transformers' model, eager and SDPA; their losses must agree.
`--kills` kills a rank in the middle of collectives that many times: the other must end by itself, and nothing may stay
in /dev/shm.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import shardzoo
from shardzoo.models import find_config
from shardzoo.mpu import ParallelMesh, collectives, dropout_state, shared_memory
from shardzoo.trainer.optimizers.adamw import AdamW

SIZES = [
    4,
    1 << 10,
    1 << 14,
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 23,
    1 << 26,
]  # bytes of a rank's tensor
KINDS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]] = {
    "all-reduce": lambda tensor, group: collectives.start_all_reduce(tensor, group)(),
    "all-gather": lambda tensor, group: collectives.start_all_gather(tensor, 0, group)(),
    "reduce-scatter": lambda tensor, group: collectives.start_reduce_scatter(tensor, 0, group)(),
}
MODELS = {
    "T5, 4 + 4 layers of 512": ("t5-small", {"num_layers": 4, "num_decoder_layers": 4}, 4, 256, 64),
    "BERT, 4 layers of 768": ("bert-base-uncased", {"num_hidden_layers": 4}, 4, 256, 0),
}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 5
    steps: bool = False
    kills: int = 0


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    transformers.logging.disable_progress_bar()
    for size in arguments.ranks:
        run(size, measure_collectives, arguments.rounds)
    if arguments.steps:
        run(2, measure_steps, arguments.rounds)
    return kill_ranks(arguments.kills) if arguments.kills else 0


def run(size: int, function: Callable[..., None], *args: object) -> None:
    context = start(size, function, *args)
    while not context.join():
        pass


def start(
    size: int, function: Callable[..., None], *args: object
) -> multiprocessing.ProcessContext:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = (size, port, function, args)
    return multiprocessing.start_processes(
        join, arguments, nprocs=size, join=False, start_method="fork"
    )


def join(
    rank: int, size: int, port: int, function: Callable[..., None], args: tuple[object, ...]
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
    )
    torch.set_num_threads(1)
    function(ParallelMesh(size), *args)
    dist.destroy_process_group()


class Route:
    """Whether tensors go through shared memory or through gloo."""

    find = staticmethod(shared_memory.find)

    @classmethod
    def choose(cls, name: str) -> None:
        shared_memory.find = cls.find if name == "shared memory" else lambda tensor, group: None


ROUTES = ("gloo", "shared memory")
Step = Callable[[], float]


def measure_collectives(mesh: ParallelMesh, rounds: int) -> None:
    table = Table(
        title=f"{mesh.tp_size} ranks, fp32, {os.cpu_count()} cores: microseconds",
        title_justify="left",
    )
    for column in ("collective", "bytes", *ROUTES, "ratio"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for kind in KINDS:
        for size in SIZES:
            micro = {
                name: 1e6 * seconds
                for name, seconds in time_collective(mesh, kind, size, rounds).items()
            }
            values = [f"{micro[name]:,.1f}" for name in ROUTES]
            table.add_row(
                kind, f"{size:,}", *values, f"{micro['gloo'] / micro['shared memory']:.1f}"
            )
    if mesh.tp_rank == 0:
        Console().print(table)


def time_collective(mesh: ParallelMesh, kind: str, size: int, rounds: int) -> dict[str, float]:
    """Checks a collective and returns its median seconds by either route."""
    elements = max(size // 4, mesh.tp_size if kind == "reduce-scatter" else 1)
    elements -= elements % mesh.tp_size if kind == "reduce-scatter" else 0
    own = torch.arange(elements, dtype=torch.float32).remainder_(64)
    tensor, seconds = torch.empty_like(own), {name: [] for name in ROUTES}
    repeats = max(3, min(200, (1 << 24) // size))
    for _ in range(rounds):
        for name in ROUTES:
            Route.choose(name)
            torch.add(own, mesh.tp_rank, out=tensor)
            check(kind, own, KINDS[kind](tensor, mesh.tp_group), mesh)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                KINDS[kind](tensor, mesh.tp_group)
            seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}


def check(kind: str, own: torch.Tensor, result: torch.Tensor, mesh: ParallelMesh) -> None:
    ranks = range(mesh.tp_size)
    total = own * mesh.tp_size + sum(ranks)
    if kind == "all-gather":
        total = torch.cat([own + rank for rank in ranks])
    if kind == "reduce-scatter":
        total = total.chunk(mesh.tp_size)[mesh.tp_rank]
    if not torch.equal(result, total):
        raise RuntimeError(f"a wrong {kind} of {own.numel()} elements")


def measure_steps(mesh: ParallelMesh, rounds: int) -> None:
    for title, (preset, changes, batch_size, length, targets) in MODELS.items():
        config = find_config(preset).to_dict() | changes
        ids = torch.randint(
            5,
            config["vocab_size"],
            (batch_size, length),
            generator=torch.Generator().manual_seed(0),
        )
        batch = {"input_ids": ids, "labels": ids[:, : targets or length].contiguous()}
        compare_steps(mesh, title, make_reference(config), batch, torch.float32, rounds)


def make_reference(config: dict) -> transformers.PreTrainedModel:
    dropouts = {name: 0.0 for name in config if "dropout" in name}
    config = transformers.AutoConfig.for_model(**config | dropouts)
    kinds = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    return kinds[not config.is_encoder_decoder].from_config(config)


def compare_steps(
    mesh: ParallelMesh,
    title: str,
    reference: transformers.PreTrainedModel,
    batch: dict[str, torch.Tensor],
    dtype: torch.dtype,
    rounds: int,
    loss_tolerance: float = 1e-5,
    autotp: bool = True,
) -> None:
    """Checks that the losses of all variants agree, and prints the seconds of their training steps."""
    steps = make_steps(mesh, reference, batch, dtype, autotp)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for turn in range(rounds + 1):  # the first is not counted
        for name, step in steps.items():
            dist.barrier()
            Route.choose("gloo" if "gloo" in name else "shared memory")
            torch.set_num_threads(mesh.tp_size if name == "one process" else 1)
            start = time.perf_counter()
            losses[name] = step()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    if mesh.tp_rank == 0 and max(losses.values()) > min(losses.values()) * (1 + loss_tolerance):
        raise RuntimeError(f"losses differ: {losses}")
    if mesh.tp_rank == 0:
        whole = statistics.median(seconds["one process"])
        table = Table(title=f"{title}: a training step", title_justify="left")
        for column in ("variant", "median s", "min … max", "× one process"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for name, values in seconds.items():
            median = statistics.median(values)
            table.add_row(
                name,
                f"{median:.3f}",
                f"{min(values):.3f} … {max(values):.3f}",
                f"{median / whole:.2f}",
            )
        Console().print(table)


def make_steps(
    mesh: ParallelMesh,
    reference: transformers.PreTrainedModel,
    batch: dict[str, torch.Tensor],
    dtype: torch.dtype,
    autotp: bool,
) -> dict[str, Step]:
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)  # under torch.distributed only the first rank writes
        folders = [folder]
        dist.broadcast_object_list(folders)
        split = native_step(shardzoo.from_pretrained(folders[0], mesh, dtype=dtype), batch)
        alone = mesh.tp_rank == 0
        whole = (
            native_step(shardzoo.from_pretrained(folder, dtype=dtype), batch)
            if alone
            else lambda: 0.0
        )
        steps = {"one process": whole}
        steps |= {f"TP={mesh.tp_size}, {route}": split for route in ROUTES}
        for attention in ("eager", "sdpa") if autotp else ():
            rival = type(reference).from_pretrained(folders[0], attn_implementation=attention)
            steps[f"TP={mesh.tp_size}, AutoTP {attention}"] = autotp_step(
                rival, mesh.tp_size, batch
            )
        dist.barrier()
    return steps


def native_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    optimizer = AdamW(model.parameters(), lr=0.0, fused=True)
    model.train()

    def step() -> float:
        dropout_state.set(1, 0)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def autotp_step(model: torch.nn.Module, size: int, batch: dict[str, torch.Tensor]) -> Step:
    """Returns a step of DeepSpeed's AutoTP, which splits transformers' model and has its own shared-memory sum."""
    import deepspeed

    model = deepspeed.tp_model_init(model.train(), tp_size=size, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.0, fused=True),
        config={
            "train_micro_batch_size_per_gpu": len(batch["input_ids"]),
            "tensor_parallel": {"autotp_size": size},
            "zero_optimization": {"stage": 0},
        },
    )

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def kill_ranks(times: int) -> int:
    """Kills one of two ranks in mid-collective. Returns how often the other did not notice, or memory stayed."""
    before, late = set(Path("/dev/shm").iterdir()), 0
    for number in track(range(times), "kills"):
        processes = start(2, exchange_until_killed, number).processes
        processes[number % 2].join()
        processes[1 - number % 2].join(10)  # ends with an error that names the other
        late += processes[1 - number % 2].exitcode != 1
        for process in processes:
            process.kill()
            process.join()
    left = set(Path("/dev/shm").iterdir()) - before
    Console().print(
        f"{times} kills: {late} not noticed within 10 s, {len(left)} files left in /dev/shm"
    )
    return int(bool(late or left))


def exchange_until_killed(mesh: ParallelMesh, number: int) -> None:
    if mesh.tp_rank == number % 2:
        threading.Timer(0.01 + number % 17 * 0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        collectives.start_all_reduce(torch.ones(10 ** (number % 7 + 1)), mesh.tp_group)()


if __name__ == "__main__":
    sys.exit(main())
