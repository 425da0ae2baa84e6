"""Measures what a machine reaches, so that `plan` predicts steps on it.

Each process of a node trains small models, all at once, because they share cores and memory. Their
steps are the sums of what `cost` counts: FLOPs, bytes, kernels. The rates are the non-negative
least-squares solution for these sums. Collectives of two sizes give the bandwidth and the latency
of the link between the processes.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch.multiprocessing.spawn import spawn

from ..models import find_config, from_config
from ..models.config import ModelConfig
from ..mpu import ParallelMesh, dropout_state, reduce_from_tp
from ..trainer import TrainingArguments
from ..trainer.engines.optimizers import make_optimizer
from ..trainer.engines.torch_engine import TorchEngine
from ..trainer.launch.rank_info import cpu_environment, free_port
from ..trainer.precisions import PrecisionName
from .cost import PlannedRun, stage_work, update_bytes
from .hardware import GB, GIB, TFLOPS
from .layouts import build_network

ROUNDS = 5
"""Steps of each model that are measured; the fastest counts."""
WARM_UP = 2
"""Steps of each model before them."""
HOST_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes."""
MESSAGES = (1 << 16, 1 << 24)
"""Bytes of the collectives."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model and a batch whose step is measured."""

    preset: str
    changes: Mapping[str, Any]
    batch: int
    length: int
    target_length: int = 0
    micro_batches: int = 1

    @property
    def config(self) -> ModelConfig:
        return find_config(self.preset).with_changes(**self.changes)

    def run(self, itemsize: int) -> PlannedRun:
        return PlannedRun(
            1, self.batch * self.micro_batches, self.batch, self.length, self.target_length, zero_stage=0,
            itemsize=itemsize,
        )  # fmt: skip


def decoder(width: int, layers: int, vocabulary: int, dropout: float, *shape: int) -> MeasuredModel:
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    sizes = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": width // 64,
        "vocab_size": vocabulary,
        "n_positions": 2048,
    }
    return MeasuredModel("gpt2-medium", sizes | drops, *shape)


def encoder_decoder(
    width: int, layers: int, vocabulary: int, dropout: float, *shape: int
) -> MeasuredModel:
    sizes = {
        "d_model": width,
        "d_ff": 4 * width,
        "num_heads": width // 64,
        "d_kv": 64,
        "vocab_size": vocabulary,
    }
    return MeasuredModel(
        "t5-small",
        sizes | {"num_layers": layers, "num_decoder_layers": layers, "dropout_rate": dropout},
        *shape,
    )


def cases() -> list[MeasuredModel]:
    """Returns models from so small that launches decide to so large that products do."""
    s = 4 if torch.cuda.is_available() else 1  # An accelerator needs wider models to be busy.
    return [
        decoder(128, 1, 512, 0.0, 1, 16),
        decoder(128, 4, 512, 0.0, 1, 16),
        decoder(128, 4, 512, 0.1, 1, 16, 0, 4),
        decoder(128 * s, 2, 1024, 0.1, 8 * s, 128),
        decoder(128 * s, 2, 1024, 0.0, s, 1024),
        decoder(256 * s, 4, 1024, 0.0, 8 * s, 128),
        decoder(256 * s, 2, 32_000, 0.0, 2 * s, 128),
        decoder(256 * s, 2, 1024, 0.1, 4 * s, 512),
        decoder(256 * s, 2, 1024, 0.0, 4 * s, 512),
        decoder(512 * s, 2, 4096, 0.1, 4 * s, 256),
        decoder(768 * s, 2, 4096, 0.0, 4 * s, 128),
        decoder(1024 * s, 2, 1024, 0.0, 2 * s, 32),
        decoder(1024 * s, 2, 1024, 0.0, 2 * s, 256),
        encoder_decoder(256 * s, 2, 2048, 0.1, 8 * s, 128, 32),
        encoder_decoder(256 * s, 2, 2048, 0.0, 8 * s, 128, 128),
        encoder_decoder(512 * s, 2, 8192, 0.1, 4 * s, 256, 64),
    ]


def calibrate(
    processes: int | None = None,
    precision: PrecisionName | None = None,
    measured: Sequence[MeasuredModel] | None = None,
) -> dict[str, Any]:
    """Returns what a file for `find_cluster` says of this machine, as a node.

    Args:
        processes: Processes of the node, each with its own GPU, or with an equal part of the cores
            where there is none. By default as many as GPUs, or 1.
        precision: Of the models that are trained, by default bf16 on GPUs and fp32 on CPUs. fp16 is
            taken for bf16. The figures hold for elements of this size.
        measured: The models that are trained, by default `cases`.

    Raises ValueError if there are fewer GPUs or cores than processes.
    """
    gpus = torch.cuda.device_count()
    most = gpus or os.cpu_count() or 1
    if processes is None:
        processes = gpus or 1
    if not 0 < processes <= most:
        shared = f"{most} {'GPUs' if gpus else 'cores'}"
        raise ValueError(
            f"{processes} processes cannot share this machine's {shared}; use 1 to {most}"
        )
    if precision is None:
        precision = "bf16" if gpus else "fp32"
    itemsize = 4 if precision == "fp32" else 2
    measured = measured or cases()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, cpu_environment(processes)),
    ):
        arguments = (processes, free_port(), itemsize, measured, Path(folder))
        spawn(_measure, arguments, nprocs=processes)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    # The processes wait for each other, so the slowest decides.
    steps = [max(case, key=sum) for case in zip(*(steps for steps, _ in found), strict=True)]
    messages = found[0][1]
    link = {"inside": _link(processes, messages)} if messages else {}
    return figures(processes, itemsize, solve(measured, steps, itemsize)) | link


def _measure(
    rank: int,
    processes: int,
    port: int,
    itemsize: int,
    measured: Sequence[MeasuredModel],
    folder: Path,
) -> None:
    """Writes the seconds of each case, [[passes, update], ...], and those of each collective."""
    if processes > 1:
        names = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
        }
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mesh = ParallelMesh(processes)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def together() -> float:
        if processes > 1:
            dist.barrier(mesh.tp_group)
        return now()

    steps = [_step_seconds(case, itemsize, device, together, now) for case in measured]
    messages = (
        [_message_seconds(size, mesh, device, together, now) for size in MESSAGES]
        if processes > 1
        else []
    )
    (folder / f"{rank:06}.json").write_text(json.dumps([steps, messages]))
    if processes > 1:
        dist.destroy_process_group()


def _step_seconds(
    case: MeasuredModel,
    itemsize: int,
    device: torch.device,
    together: Callable[[], float],
    now: Callable[[], float],
) -> tuple[float, float]:
    """Returns the seconds of the passes of a training step and of its update, by the trainer's own
    engine.
    """
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    arguments = TrainingArguments(
        precision="fp32" if itemsize == 4 else "bf16",
        gradient_accumulation_steps=case.micro_batches,
    )
    config = case.config
    model: Any = from_config(config).to(device, dtype).train()
    engine = TorchEngine(model, make_optimizer(model, arguments), arguments)
    ids = torch.randint(3, config.vocab_size, (case.batch, case.length), device=device)
    labels = ids[:, : case.target_length or case.length].contiguous()

    def forward(k: int) -> torch.Tensor:
        dropout_state.set(1, k * case.batch)
        return model(input_ids=ids, labels=labels).loss / case.micro_batches

    taken: list[tuple[float, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        start = together()
        engine.forward_backward(forward, case.micro_batches)
        middle = now()
        engine.step()
        end = now()
        taken.append((middle - start, end - middle))
    return min(taken[WARM_UP:], key=sum)


def _message_seconds(
    size: int,
    mesh: ParallelMesh,
    device: torch.device,
    together: Callable[[], float],
    now: Callable[[], float],
) -> float:
    tensor = torch.zeros(size // 4, device=device)
    taken: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        start = together()
        for _ in range(10):
            reduce_from_tp(tensor, mesh)
        taken.append((now() - start) / 10)
    return statistics.median(taken[WARM_UP:])


def figures(processes: int, itemsize: int, solution: np.ndarray) -> dict[str, Any]:
    """Returns what a file says, in its units.

    The peak and the bandwidth are those that were reached, whole.
    """
    flop, fused, byte, kernel, masked, updated, step = solution.tolist()
    gpus = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else HOST_MEMORY / processes
    return {
        "device": "h100" if gpus else "cpu",  # whose network it gets
        "peak": 1 / flop / TFLOPS,
        "peak_fp32": 1 / flop / TFLOPS,
        "sustained": 1.0,
        "memory": memory / GIB,
        "bandwidth": 1 / byte / GB,
        "node_size": processes,
        "adapters": 1,
        "rates": {
            "compute": 1.0,
            "attention": flop / fused,
            "memory": 1.0,
            "update": byte / updated,
            "link": 1.0,
            "overlap": 0.0,
            "launch": kernel,
            "dropout": masked,
            "step": step,
            "asynchronous": gpus,
        },
    }


def _link(processes: int, messages: Sequence[float]) -> dict[str, float]:
    """Returns bandwidth and latency: an all-reduce of B bytes over r ranks has 2 (r - 1) messages
    of B / r bytes.
    """
    small, large = (seconds / (2 * (processes - 1)) for seconds in messages)
    byte = (large - small) / (MESSAGES[1] - MESSAGES[0]) * processes
    return {"bandwidth": 1 / byte / GB, "latency": max(small - byte * MESSAGES[0] / processes, 0.0)}


def solve(
    measured: Sequence[MeasuredModel], steps: Sequence[Sequence[float]], itemsize: int
) -> np.ndarray:
    """Returns the seconds of a FLOP, a FLOP of attention, a byte, a kernel, a masked element, an
    updated byte, a step.

    Each measured step is two equations, one without its update and one of it, relative to its
    seconds. What is not seen in any gets a millionth of what it would need to be all of the largest
    step.
    """
    rows: list[list[float]] = []
    seconds: list[float] = []
    for case, (passes, update) in zip(measured, steps, strict=True):
        network = build_network(case.config)
        run = case.run(itemsize)
        every_block = tuple(stack.layers for stack in network.stacks)
        _, all_passes = stage_work(network, run, every_block, True)
        work = all_passes * case.micro_batches
        rows.append(
            [
                work.flops,
                work.fused,
                work.operands + work.traffic,
                work.kernels,
                work.masked,
                0.0,
                1.0,
            ]
        )
        rows.append([0.0, 0.0, 0.0, 0.0, 0.0, update_bytes(network, run), 1.0])
        seconds += [passes, update]
    counts = np.array(rows)
    taken = np.array(seconds)
    found, _ = nnls(counts / taken[:, None], np.ones(len(taken)))
    return np.maximum(found, 1e-6 * taken.max() / counts.max(0))
