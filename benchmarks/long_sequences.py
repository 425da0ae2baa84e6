"""Trains a T5 for one step on long sequences, native and by transformers, and prints time and peak memory.

    python benchmarks/long_sequences.py --lengths 2048 8192 --limit 22

Both have 4 + 4 layers of width 512 with a trained bias by distance, dropout 0.1, fp32, random weights, AdamW, and as
many target as source tokens; transformers' attention is SDPA or eager. Every step runs in a process of its own, which
may take `--limit` GiB of data; "does not fit" means that it asked for more.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

# Large freed blocks go back to the system, so that the peak is what the step needs; set before the process starts.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "1"}
RIVALS = {"native": "", "transformers, SDPA": "sdpa", "transformers, eager": "eager"}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    lengths: tuple[int, ...] = (2048, 4096, 8192)
    """Tokens of the source, and of the target."""
    layers: int = 4
    """Layers of the encoder, and of the decoder."""
    limit: float = 22.0
    """GiB of data that a process may have."""


def main() -> int:
    import tyro
    from rich.console import Console
    from rich.table import Table

    arguments = tyro.cli(Arguments, description=__doc__)
    table = Table(
        title=f"T5, {arguments.layers} + {arguments.layers} layers, one training step",
        title_justify="left",
    )
    for column in ("length", "who", "loss", "seconds", "peak GiB", "of which the step's"):
        table.add_column(column, justify="left" if column == "who" else "right")
    for length in arguments.lengths:
        for name, attention in RIVALS.items():
            table.add_row(str(length), name, *in_a_process(length, arguments, attention))
    Console().print(table)
    return 0


def in_a_process(length: int, arguments: Arguments, attention: str) -> list[str]:
    """Returns the cells of a step that runs by itself."""
    order = [
        sys.executable,
        __file__,
        "step",
        str(length),
        str(arguments.layers),
        attention,
        str(arguments.limit),
    ]
    ran = subprocess.run(
        order, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        fits = "can't allocate memory" not in ran.stderr and ran.returncode != -9
        return ["", "", ran.stderr.strip().splitlines()[-1] if fits else "does not fit", ""]
    loss, seconds, before, peak = json.loads(ran.stdout.splitlines()[-1])
    return [f"{loss:.4f}", f"{seconds:.1f}", f"{peak:.2f}", f"{peak - before:.2f}"]


def step(length: int, layers: int, attention: str, limit: float) -> None:
    """Prints the loss, the seconds, and the GiB in memory before the step and at its peak."""
    import torch
    import transformers

    import shardzoo
    from shardzoo.mpu import dropout_state

    size = {
        "d_model": 512,
        "d_ff": 2048,
        "num_layers": layers,
        "num_heads": 8,
        "d_kv": 64,
        "dropout_rate": 0.1,
    }
    config = transformers.T5Config(**size, decoder_start_token_id=0)
    torch.manual_seed(0)
    if attention:
        config._attn_implementation = (
            attention  # what `attn_implementation=` of from_pretrained sets
        )
        model = transformers.T5ForConditionalGeneration(config)
    else:
        model = shardzoo.from_config(config)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    ids = torch.randint(2, config.vocab_size, (1, length))
    before = in_memory()
    byte_limit = int(limit * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (byte_limit, byte_limit))
    start = time.perf_counter()
    dropout_state.set(1, 0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps([loss.item(), time.perf_counter() - start, before, peak]))


def in_memory() -> float:
    """Returns the GiB of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**30


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        step(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    else:
        sys.exit(main())
