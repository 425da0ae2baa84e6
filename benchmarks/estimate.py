"""Compares the memory estimate with measurements on a CPU, and shows estimates for a card with 24 GB.

    python benchmarks/estimate.py

Each configuration is trained for a few steps in separate processes, with the trainer's engines. Two peaks of the
largest rank are measured:

- resident: the process's peak resident memory (VmHWM of proc(5), reset before the last step) minus its resident memory
  before the model was built. This peak decides whether a run is killed. It includes what allocators keep.
- tensors: the running sum of the allocations and releases that torch's profiler sees, C++ temporaries included.

The estimate must match the resident peak. The peak of the tensors separates errors of the formulas from effects of an
allocator.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardzoo.models import find_config
from shardzoo.trainer.estimate import Job, estimate, largest_micro_batch
from shardzoo.trainer.estimate.estimate import FRAMEWORK

TOLERANCE = 0.10
STEPS = 3
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A configuration to measure.

    Attributes:
        name: The title in the table.
        preset: The preset of the model.
        changes: Changes of the preset's configuration.
        job: Fields of the `Job` that trains the model.
    """

    name: str
    preset: str
    changes: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)

    def config(self):
        return find_config(self.preset).with_changes(**self.changes)


# What the README of t2t-tuner reports as trained on a card with 24 GB.
GPT_NEO_1_3B = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16}
GPT_NEO_2_7B = {"hidden_size": 2560, "num_layers": 32, "num_heads": 20}
T2T_TABLE = (
    ("gpt2-xl", {"precision": "fp16", "length": 128, "micro_batch_size": 4}),
    ("gpt2-xl", {"precision": "fp16", "length": 496, "micro_batch_size": 1}),
    ("gpt2-xl", {"precision": "fp16", "length": 1024, "micro_batch_size": 4, "recompute": "full"}),
    ("gpt-neo-1.3B", {"precision": "fp16", "length": 1024, "micro_batch_size": 1}),
    ("gpt-neo-1.3B", {"precision": "fp16", "length": 2048, "micro_batch_size": 4, "recompute": "full"}),
    ("gpt-neo-2.7B", {"precision": "fp16", "length": 2048, "micro_batch_size": 4, "recompute": "full",
                      "frozen": ("embeddings",)}),
    ("t5-3b", {"precision": "fp32", "length": 128, "micro_batch_size": 1, "frozen": ("embeddings",)}),
    ("t5-3b", {"precision": "fp32", "length": 128, "micro_batch_size": 1, "recompute": "full"}),
    ("t5-3b", {"precision": "fp32", "length": 128, "micro_batch_size": 128, "recompute": "full",
               "frozen": ("embeddings",)}),
    ("t5-3b", {"precision": "fp32", "length": 512, "micro_batch_size": 32, "recompute": "full",
               "frozen": ("embeddings",)}),
)  # fmt: skip
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 6, "vocab_size": 32000}
T5 = {
    "d_model": 640,
    "d_kv": 64,
    "num_heads": 10,
    "d_ff": 2048,
    "num_layers": 6,
    "vocab_size": 32128,
}
CASES = (
    Case("GPT-2, AdamW", "gpt2", GPT2, {"micro_batch_size": 4, "length": 512, "padded": False}),
    Case(
        "GPT-2, bf16, Lion, full recomputation",
        "gpt2",
        GPT2 | {"n_layer": 10},
        {"micro_batch_size": 8, "length": 512, "precision": "bf16", "optimizer": "lion", "recompute": "full"},
    ),
    Case(
        "BERT, LAMB, selective recomputation",
        "bert-base-uncased",
        {"num_hidden_layers": 8},
        {"micro_batch_size": 8, "length": 384, "optimizer": "lamb", "recompute": "selective"},
    ),
    Case(
        "T5, Adafactor, embeddings frozen",
        "t5-base",
        T5,
        {"micro_batch_size": 6, "length": 384, "target_length": 192, "optimizer": "adafactor",
         "frozen": ("embeddings",)},
    ),
    Case(
        "mT5, TP=2, sequence parallel",
        "mt5-base",
        T5 | {"vocab_size": 48000},
        {"micro_batch_size": 4, "length": 384, "target_length": 128, "tensor_parallel_size": 2,
         "sequence_parallel": True},
    ),
    Case(
        "GLM, bf16, two micro-batches",
        "glm-large",
        {"num_layers": 6},
        {"micro_batch_size": 4, "length": 384, "precision": "bf16", "accumulation_steps": 2},
    ),
    Case(
        "T5, bf16, full recomputation",
        "t5-base",
        T5 | {"vocab_size": 8000},
        {"micro_batch_size": 8, "length": 384, "target_length": 256, "precision": "bf16", "recompute": "full"},
    ),
    Case("GPT-2 of 1.4 GB, LoRA", "gpt2-medium", {}, {"micro_batch_size": 4, "length": 256, "lora_rank": 8}),
    Case(
        "T5, LoRA of all layers, TP=2",
        "t5-base",
        {},
        {"micro_batch_size": 4, "length": 256, "target_length": 128, "tensor_parallel_size": 2, "lora_rank": 16,
         "lora_target_modules": "all-linear"},
    ),
    Case(
        "GPT-2, DDP=2, no dropout",
        "gpt2",
        GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"micro_batch_size": 2, "length": 512, "data_parallel_size": 2, "padded": False},
    ),
    Case(
        "GPT-2, bf16, ZeRO-1, DP=2, two micro-batches",
        "gpt2",
        GPT2 | {"n_layer": 8},
        {"micro_batch_size": 4, "length": 512, "precision": "bf16", "data_parallel_size": 2, "zero_stage": 1,
         "accumulation_steps": 2},
    ),
    Case(
        "GPT-2, bf16, ZeRO-2, DP=2",
        "gpt2",
        GPT2 | {"n_layer": 8},
        {"micro_batch_size": 4, "length": 512, "precision": "bf16", "data_parallel_size": 2, "zero_stage": 2},
    ),
)  # fmt: skip


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--measure":
        measure(Case(**json.loads(sys.argv[2])))
        return 0
    show_t2t_table()
    wanted = sys.argv[1:]
    cases = [case for case in CASES if not wanted or any(word in case.name for word in wanted)]
    table = Table(title="one rank's peak above Python's own memory, MiB", title_justify="left")
    for column in ("configuration", "estimated", "resident", "", "tensors", ""):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    worst = 0.0
    for case in cases:
        expected = estimated(case) / MIB
        resident, tensors = (value / MIB for value in run(case))
        worst = max(worst, abs(expected / resident - 1))
        figures = [f"{expected:,.0f}"]
        for value in (resident, tensors):
            figures += [f"{value:,.0f}", f"{expected / value - 1:+.1%}"]
        table.add_row(case.name, *figures)
        print(case.name, figures, flush=True)
    Console().print(table)
    print(f"the largest error is {worst:.1%} of the resident peak; {TOLERANCE:.0%} is allowed")
    return int(worst > TOLERANCE)


def t2t_config(name: str) -> Any:
    """Returns a preset's configuration, or transformers' configuration of GPT-Neo, which is not in the zoo."""
    if not name.startswith("gpt-neo"):
        return find_config(name)
    from transformers import AutoConfig

    sizes = GPT_NEO_1_3B if name.endswith("1.3B") else GPT_NEO_2_7B
    kinds = [[["global", "local"], sizes["num_layers"] // 2]]
    return AutoConfig.for_model(
        "gpt_neo", **sizes, vocab_size=50257, max_position_embeddings=2048, attention_types=kinds
    )


def show_t2t_table(memory: int = 24 << 30) -> None:
    table = Table(title="Adafactor on a card of 24 GB", title_justify="left")
    for column in (
        "model",
        "precision",
        "length",
        "batch",
        "other",
        "peak at",
        "GiB",
        "fits",
        "largest batch",
    ):
        table.add_column(column)
    for name, values in T2T_TABLE:
        config, job = t2t_config(name), Job(optimizer="adafactor", **values)
        peak = estimate(config, job).peak
        largest = largest_micro_batch(
            lambda size: estimate(config, replace(job, micro_batch_size=size)).peak.total <= memory  # noqa: B023
        )
        other = ", ".join(
            (["recompute"] if job.recompute == "full" else [])
            + [f"frozen {part}" for part in job.frozen]
        )
        cells = (
            job.precision,
            job.length,
            job.micro_batch_size,
            other,
            peak.name,
            f"{peak.total / (1 << 30):.1f}",
        )
        table.add_row(name, *map(str, cells), "yes" if peak.total <= memory else "no", str(largest))
    Console(width=120).print(table)


def job_of(case: Case) -> Job:
    values = {"precision": "fp32", "device": "cpu"} | case.job
    return Job(**values | {"frozen": tuple(values.get("frozen", ()))})


def estimated(case: Case) -> int:
    return estimate(case.config(), job_of(case)).peak.total - FRAMEWORK["cpu"]


def run(case: Case) -> tuple[int, int]:
    """Returns (peak resident, peak of tensors) in bytes, each the largest of all ranks."""
    job = job_of(case)
    ranks = job.tensor_parallel_size * job.data_parallel_size
    environment = dict(os.environ) | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        # Freed memory is returned to the system at once; otherwise the peak would include the C library's pools.
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "SHARDZOO_POOL_MIB": "0",
        "THP_MEM_ALLOC_ENABLE": "0",
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", json.dumps(asdict(case))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-3000:]}")
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("measured ")]
    assert len(lines) == ranks, done.stdout
    resident, tensors = zip(*[(int(a), int(b)) for a, b in lines], strict=True)
    return max(resident), max(tensors)


def measure(case: Case) -> None:
    """Trains in a rank's process and prints the two peaks."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from shardzoo.models import ParallelConfig, from_config
    from shardzoo.mpu import ParallelMesh
    from shardzoo.trainer.arguments.training_arguments import TrainingArguments
    from shardzoo.trainer.engines.factory import make_engine
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.launch.environment import initialize_distributed
    from shardzoo.trainer.launch.launch import ensure_processes
    from shardzoo.trainer.launch.ranks import Ranks
    from shardzoo.trainer.lora import apply_lora

    job = job_of(case)
    launch = ensure_processes(job.tensor_parallel_size * job.data_parallel_size)
    mesh = None
    if launch.world_size > 1 or job.stage is not None:
        initialize_distributed(launch)
        mesh = ParallelMesh(job.tensor_parallel_size)
    arguments = TrainingArguments(
        env_type=environment_of(job),
        micro_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=job.accumulation_steps,
        model_parallel_size=job.tensor_parallel_size,
        zero_stage=job.stage,
        precision=job.precision,
        optimizer=job.optimizer,
        recompute=job.recompute,
        sequence_parallel=job.sequence_parallel,
        lora_rank=job.lora_rank,
        lora_target_modules=[] if job.lora_target_modules is None else [job.lora_target_modules],
    )
    warm_up(arguments)
    gc.collect()
    before = status("VmRSS")
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        parallel_config = ParallelConfig(job.sequence_parallel, job.recompute)
        dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
        model = from_config(
            case.config(),
            mesh if job.tensor_parallel_size > 1 else None,
            dtype=dtype,
            parallel_config=parallel_config,
        )
        apply_lora(model, arguments)
        freeze(model, job)
        engine = make_engine(model, make_optimizer(model, arguments), arguments, Ranks(mesh))
        batch = batch_of(case, job)
        for step in range(STEPS):
            if step == STEPS - 1:
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak; see proc(5)
            train_step(engine, batch, job, step)
        resident = status("VmHWM") - before
    os.write(1, f"measured {resident} {peak_of_tensors(profiler)}\n".encode())


def environment_of(job: Job) -> str:
    if job.tensor_parallel_size > 1:
        return "deepspeed+mpu"
    if job.stage is not None:
        return "deepspeed"
    return "pytorchDDP" if job.data_parallel_size > 1 else "pytorch"


def warm_up(arguments: Any) -> None:
    """Imports modules and starts thread pools, so that their memory is not counted as the model's."""
    import torch

    from shardzoo.models import from_config
    from shardzoo.mpu import dropout_state
    from shardzoo.trainer.engines.optimizers import make_optimizer

    if arguments.env_type.startswith("deepspeed"):
        import deepspeed  # noqa: F401
    if arguments.lora_rank:
        import peft  # noqa: F401
    tiny = from_config(find_config("gpt2-quickstart").with_changes(n_embd=48, n_layer=1))
    optimizer = make_optimizer(tiny, arguments)
    ids = torch.ones(2, 8, dtype=torch.long)
    dropout_state.set(0, 0)
    tiny(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def freeze(model: Any, job: Job) -> None:
    from shardzoo.models.sizes import is_embedding

    if "embeddings" in job.frozen:
        for module in model.modules():
            if is_embedding(module):
                module.requires_grad_(False)


def batch_of(case: Case, job: Job) -> dict[str, Any]:
    import torch

    config = case.config()
    shape = (job.micro_batch_size, job.length)
    ids = torch.randint(5, config.vocab_size, shape)
    target = (job.micro_batch_size, job.target_length or job.length)
    labels = (
        torch.randint(5, config.vocab_size, target) if config.model_type in ("t5", "mt5") else ids
    )
    batch = {"input_ids": ids, "labels": labels}
    if job.padded:
        lengths = torch.full((shape[0],), job.length // 2)
        batch["attention_mask"] = lengths if config.model_type == "glm" else torch.ones_like(ids)
        if config.model_type != "glm":
            batch["attention_mask"][0, job.length // 2 :] = 0
    return batch


def train_step(engine: Any, batch: dict[str, Any], job: Job, step: int) -> None:
    from shardzoo.mpu import dropout_state

    def forward(number: int) -> Any:
        dropout_state.set(1, step)
        return engine.model(**batch).loss / job.accumulation_steps

    engine.module.train()
    engine.forward_backward(forward, job.accumulation_steps)
    engine.step()


def status(name: str) -> int:
    """Returns the bytes on the line of this name in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def peak_of_tensors(profiler: Any) -> int:
    """Returns the largest running sum of allocations and releases in bytes."""
    events = profiler.profiler.kineto_results.events()
    total = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


if __name__ == "__main__":
    sys.exit(main())
