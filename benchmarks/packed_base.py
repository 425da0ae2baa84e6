"""Measures the memory of training LoRA weights on a bf16 base, and on the same base packed.

    python benchmarks/packed_base.py

The base is a Llama of random weights, of 1.4 GB in bf16 by default. Each training is a process of two steps of
`Trainer` on a CPU. Its figure is the largest resident memory above that of the process before the base is loaded. That
of `estimate` stands beside it, and the loss of both steps.

The script ends with an error if the packed run needs more than `--most` of the bf16 run's memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

import shardzoo
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.logging.reporter import SilentReporter

GIB = 1 << 30
PLAIN = "bf16"


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    hidden_size: int = 1536
    layers: int = 24
    vocab_size: int = 32000
    length: int = 64
    """Tokens of the one sequence of a step."""
    lora_rank: int = 8
    precisions: tuple[str, ...] = ("nf4",)
    """Of nf4, int8, fp8."""
    threads: int = 1
    most: float = 0.45
    """The largest share of the bf16 run's memory, for nf4."""
    json: Path | None = None
    """A file for the results."""
    base: Path | None = None
    """Set for a process that trains: the folder of the base."""


def describe_base(arguments: Arguments) -> dict[str, object]:
    """Returns the config.json of the base."""
    return {
        "model_type": "llama",
        "vocab_size": arguments.vocab_size,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.hidden_size * 8 // 3,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden_size // 64,
        "num_key_value_heads": arguments.hidden_size // 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def read_memory(name: str) -> int:
    """Returns a value of this process's status in bytes, such as VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not tell {name}")


class Losses(SilentReporter):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def training(self, step: int, values: dict[str, float]) -> None:
        self.found.append(values["loss"])


def run_steps(arguments: Arguments, model: nn.Module) -> list[float]:
    """Trains LoRA weights of a model for two steps, and returns their losses."""
    ids = torch.arange(arguments.length) + 5
    samples = [{"input_ids": ids + row, "labels": ids + row} for row in range(2)]
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            env_type="pytorch",
            precision="bf16",
            micro_batch_size=1,
            train_steps=2,
            lora_rank=arguments.lora_rank,
            lora_target_modules=("all-linear",),
            log_interval=1,
            save_interval=1 << 30,
            save_dir=folder,
        )
        Trainer(settings).train(model, train_dataset=samples, reporter=losses)
    return losses.found


def train(arguments: Arguments, base: Path) -> None:
    """Trains on the base, and prints the memory and the losses as JSON."""
    [precision] = arguments.precisions
    # A small model first, so that what is imported and set up once counts for no side.
    small = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = {**describe_base(arguments), **small, "num_hidden_layers": 1, "vocab_size": 1024}
    run_steps(arguments, shardzoo.from_config(config, dtype=torch.bfloat16))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = read_memory("VmRSS")

    packed = None if precision == PLAIN else precision
    model = shardzoo.from_pretrained(base, dtype=torch.bfloat16, base_precision=packed)
    losses = run_steps(arguments, model)
    print(json.dumps({"peak": read_memory("VmHWM") - before, "losses": losses}))


def estimate_memory(arguments: Arguments, precision: str) -> int:
    """Returns the bytes of the largest moment by `estimate`, without those of the framework."""
    from shardzoo.models.auto import as_config
    from shardzoo.trainer.estimate import Job, estimate

    job = Job(
        length=arguments.length,
        padded=False,
        precision="bf16",
        lora_rank=arguments.lora_rank,
        lora_target_modules="all-linear",
        base_precision=None if precision == PLAIN else precision,
        device="cpu",
    )
    found = estimate(as_config(describe_base(arguments)), job)
    return found.peak.total - found.peak.lines["framework"]


def measure(arguments: Arguments, base: Path, precision: str) -> dict[str, object]:
    """Returns the memory and the losses of a process of its own."""
    options = [f"--base={base}", "--precisions", precision, f"--threads={arguments.threads}"]
    for name in ("hidden_size", "layers", "vocab_size", "length", "lora_rank"):
        options.append(f"--{name.replace('_', '-')}={getattr(arguments, name)}")
    # glibc keeps the memory of freed tensors below its threshold, which grows up to 32 MiB, and
    # then counts holes between small tensors. From 1 MiB on, it shall return it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "estimate": estimate_memory(arguments, precision)}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(arguments.threads)
    if arguments.base is not None:
        train(arguments, arguments.base)
        return
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        model = shardzoo.from_config(describe_base(arguments), dtype=torch.bfloat16)
        model.save_pretrained(base)
        size = sum(parameter.nbytes for parameter in model.parameters())
        del model
        for precision in (PLAIN, *arguments.precisions):
            results[precision] = measure(arguments, base, precision)

    table = Table(title=f"LoRA on a base of {size / 1e9:.2f} GB in bf16", title_justify="left")
    for name in ("base", "peak GiB", "of bf16", "estimate GiB", "losses"):
        table.add_column(name)
    shares: dict[str, float] = {}
    for precision, found in results.items():
        shares[precision] = found["peak"] / results[PLAIN]["peak"]
        losses = ", ".join(f"{loss:.4f}" for loss in found["losses"])
        peak = f"{found['peak'] / GIB:.3f}"
        estimated = f"{found['estimate'] / GIB:.3f}"
        table.add_row(precision, peak, f"{shares[precision]:.3f}", estimated, losses)
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bytes": size, **results}, indent=1) + "\n")
    if shares.get("nf4", 0.0) > arguments.most:
        raise SystemExit(f"nf4 needs {shares['nf4']:.3f} of bf16's memory, above {arguments.most}")


if __name__ == "__main__":
    main()
