"""Trains a T5 on one long sequence that several processes share, and prints a rank's memory and time.

    python benchmarks/context.py --lengths 8192 16384 32768 65536 --contexts 1 2 4 --exchange heads
    python benchmarks/context.py --lengths 8192 --contexts 1 2 --tensors 1 2 --steps 3 --keep-freed

The model has 4 + 4 layers of width 512 with a trained bias by distance, dropout 0.1, fp32, random weights; the
target has an eighth of the source's tokens. Every rank is a process with one thread (`--threads`). The memory of a
step is what a rank needs at most beyond its parameters and their gradients, which exist before it: the peak that the
system has counted (VmHWM) less what was there. Without `--no-check` the losses of all layouts of a length must agree.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

# Freed blocks go back to the system at once, so that the peak is what the step needs; set before the process starts.
# They are mapped again each time, which takes time, so that steps are timed with `--keep-freed`.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "SHARDZOO_POOL_MIB": "0"}
WIDTH = 512


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    lengths: tuple[int, ...] = (8192,)
    """Tokens of the source."""
    contexts: tuple[int, ...] = (1, 2, 4)
    """Context-parallel sizes."""
    tensors: tuple[int, ...] = (1,)
    """Tensor-parallel sizes, each beside a context-parallel size of 1, and 1 beside the others."""
    exchange: str = "heads"
    """What context-parallel ranks exchange: heads, keys or ring."""
    layers: int = 4
    """Layers of the encoder, and of the decoder."""
    dropout: float = 0.1
    """Its rate; the ring is faster without."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes."""
    steps: int = 1
    """Steps, of which the fastest counts."""
    threads: int = 1
    """Threads of a rank."""
    keep_freed: bool = False
    """Keep the memory of freed tensors for new ones, as training does: faster, and the peak is larger."""
    check: bool = True
    """Whether the losses must agree."""
    output: Path | None = None
    """Where to write the results as JSON."""


def main() -> int:
    import tyro

    arguments = tyro.cli(Arguments, description=__doc__)
    results: list[dict[str, Any]] = []
    wrong = False
    for length in arguments.lengths:
        layouts = [(context, 1) for context in arguments.contexts]
        layouts += [(1, tensor) for tensor in arguments.tensors if tensor > 1]
        losses: list[float] = []
        for context, tensor in layouts:
            found = run_ranks(length, context, tensor, arguments)
            results.append(found)
            losses.append(found["loss"])
            print(
                f"S {length:6d}  cp {context}  tp {tensor}  loss {found['loss']:.5f}  "
                f"{found['gib']:.3f} GiB a rank  {found['seconds']:.2f} s",
                flush=True,
            )
        if arguments.check and max(losses) - min(losses) > 1e-4:
            print(f"the losses of {length} tokens differ: {losses}", file=sys.stderr)
            wrong = True
    if arguments.output is not None:
        settings = {**asdict(arguments), "output": None}
        arguments.output.write_text(
            json.dumps({"settings": settings, "results": results}, indent=1)
        )
    return int(wrong)


def run_ranks(length: int, context: int, tensor: int, arguments: Arguments) -> dict[str, Any]:
    """Returns the loss, the largest memory of a rank and the seconds of a step."""
    ranks = context * tensor
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        **({"THP_MEM_ALLOC_ENABLE": "1"} if arguments.keep_freed else ALLOCATOR),
        "OMP_NUM_THREADS": str(arguments.threads),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    job = json.dumps(
        [
            length,
            context,
            tensor,
            arguments.layers,
            arguments.exchange,
            arguments.dropout,
            arguments.steps,
            arguments.recompute,
        ]
    )
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", job],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of cp {context}, tp {tensor} failed at {length} tokens")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "length": length,
        "context": context,
        "tensor": tensor,
        "recompute": arguments.recompute,
        "loss": found[0][0],
        "gib": max(each[1] for each in found),
        "seconds": max(each[2] for each in found),
    }


def measure_rank(job: str) -> None:
    """Prints the loss, the GiB and the seconds of a step of one rank."""
    import torch

    import shardzoo
    from shardzoo.models import ParallelConfig
    from shardzoo.mpu import ParallelMesh, dropout_state

    length, context, tensor, layers, exchange, dropout, steps, recompute = json.loads(job)
    mesh = None
    if context * tensor > 1:
        mesh = ParallelMesh(tensor, context_parallel_size=context)
    config = {
        "model_type": "t5",
        "vocab_size": 8192,
        "d_model": WIDTH,
        "d_ff": 2048,
        "num_layers": layers,
        "num_heads": 8,
        "d_kv": 64,
        "dropout_rate": dropout,
        "decoder_start_token_id": 0,
    }
    parallel = ParallelConfig(context_exchange=exchange, recompute=recompute)
    model = shardzoo.from_config(config, mesh, parallel_config=parallel, seed=0).train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, config["vocab_size"], (1, length), generator=generator)
    labels = ids[:, : length // 8].flip(1)

    def take_step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        dropout_state.set(1, 0)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss.item()

    # A short step loads what the first one needs, and makes the gradients.
    take_step(ids[:, :256], labels[:, :256])
    seconds: list[float] = []
    loss = 0.0
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    for _ in range(steps):
        if mesh is not None:
            torch.distributed.barrier()
        start = time.perf_counter()
        loss = take_step(ids, labels)
        seconds.append(time.perf_counter() - start)
    peak = read_status("VmHWM")
    print(json.dumps([loss, (peak - before) / 2**20, min(seconds)]))


def read_status(name: str) -> int:
    """Returns a number of KiB that the system keeps about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure_rank(sys.argv[2])
    else:
        sys.exit(main())
