"""Measures whole training steps of a model at full depth beside transformers, and the trainer's memory.

    python benchmarks/gpu/steps.py --model gpt2-medium --device cuda --json FILE

Both sides have the same weights and batch, and a loop of forward, backward, clipping and a fused AdamW of the weights'
type. transformers runs with SDPA as PyTorch chooses it, with flash attention, and with compiled blocks; ours
uncompiled and with compiled blocks. Each runs without dropout and with that of its configuration. Without dropout the
loss and the gradient norm of every variant are compared before any is timed. The trainer then runs its own loop, with
fp32 master weights; its peak memory stands beside the prediction of `shardzoo estimate`.

A variant that fails, such as flash attention with a bias, is named, and the others are measured. Times are those of a
block of steps between two synchronizations. MFU counts the FLOPs of the model (plan/cost.py) over the device's dense
16-bit peak. A variant that compiles compiles each block, which takes seconds where the whole model takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from report import save, table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import WORKLOADS, Samples, Workload, batch_of, build

import shardzoo
from shardzoo.mpu import dropout_state
from shardzoo.plan.cost import PlannedRun, model_flops
from shardzoo.plan.layouts import build_network
from shardzoo.trainer import Trainer
from shardzoo.trainer.engines.precision import compile_model
from shardzoo.trainer.estimate import Job, estimate
from shardzoo.trainer.logging.diagnostics import device_peak
from shardzoo.trainer.logging.reporter import SilentReporter

COLUMNS = ("variant", "dropout", "ms", "samples/s", "tokens/s", "MFU", "peak GiB", "loss")
MEMORY_COLUMNS = ("run", "measured GiB", "predicted GiB", "measured / predicted")
# Relative, of the loss and of the gradient norm, in bf16 and in TF32, whose products have eight and eleven bits.
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-2, 5e-2
WARM_UP, STEPS, ROUNDS = 2, 4, 3  # steps before, in and between the synchronizations that are timed
TRAINED = ("gpt2-medium", "gpt2-xl", "gpt2-64")  # also by the trainer, in a quick measurement
RECORDED = ("gpt2-64",)  # whose steps are so short that queuing them is most of their time
LONG_STEP = 0.2  # seconds; a quick measurement takes half as many of these
GIB = 1 << 30
Step = Callable[[], tuple[Tensor, Tensor]]


class WrongResult(Exception):
    """A variant computes something else, so that its speed says nothing."""


class Enough(Exception):
    """Ends a run of the trainer before it saves its last step, which would take longer than all others."""


class Bench:
    """The device, the model and the table of its variants."""

    def __init__(
        self, name: str, device: str, tiny: bool, path: Path, *, quick: bool = False
    ) -> None:
        self.quick = quick
        whole = WORKLOADS[name]
        self.workload: Workload = whole.tiny() if tiny else whole
        self.name, self.device, self.tiny, self.path = name, device, tiny, path
        self.config = self.workload.config(tiny)
        self.batch = batch_of(self.workload, self.config.vocab_size, device)
        work = self.workload
        run = PlannedRun(1, work.batch, work.batch, work.length, work.target)
        self.flops = model_flops(build_network(self.config), run)
        self.peak = device_peak(torch.device(device))
        self.expected: tuple[float, float] | None = None
        self.rows: list[list[str]] = []
        self.memory: list[list[str]] = []
        self.wrong = False

    def show(self, *cells: str) -> None:
        self.rows.append([*cells, *[""] * (len(COLUMNS) - len(cells))])
        print(*cells, sep="  ", flush=True)
        self.save()

    def save(self) -> None:
        work, note = self.workload, f"; {self.workload.note}" if self.workload.note else ""
        sizes = f"{work.batch} × {work.length}" + (f" + {work.target}" if work.target else "")
        kind = "fp32 (TF32 products)" if work.tf32 else work.precision
        tables = [
            table(
                f"A training step of {self.name}, {kind}, {sizes} tokens{note}", COLUMNS, self.rows
            )
        ]
        if self.memory:
            tables.append(
                table(f"Peak memory of the trainer, {self.name}", MEMORY_COLUMNS, self.memory)
            )
        save(self.path, tables)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Returns the memory of models that nobody refers to, and begins to measure the peak again."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> str:
        return f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if self.device == "cuda" else "–"

    def attempt(self, variant: str, measure: Callable[[], None], dropout: str = "") -> None:
        """Calls `measure`. What fails is named, and counts as wrong if it is ours or computes something else."""
        try:
            measure()
        except Exception as error:
            self.show(variant, dropout, f"{type(error).__name__}: {error}".partition("\n")[0])
            self.wrong |= isinstance(error, WrongResult) or not variant.startswith("transformers")
        self.free()

    def check(self, variant: str, loss: float, norm: float) -> None:
        """Raises WrongResult if a loss or gradient norm without dropout is not that of the first variant."""
        if self.expected is None:
            self.expected = loss, norm
        differences = abs(loss / self.expected[0] - 1), abs(norm / self.expected[1] - 1)
        if not (differences[0] <= LOSS_TOLERANCE and differences[1] <= NORM_TOLERANCE):
            raise WrongResult(
                f"{variant} has loss {loss:.5f} and gradient norm {norm:.5f}, not {self.expected}"
            )

    def measure(
        self, variant: str, model: nn.Module, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Times a model's steps without and, if it has any, with dropout."""
        step = make_step(model, self.batch)
        has_dropout = any(
            "drop" in name and value for name, value in self.config.to_dict().items() if value != 1
        )
        for mode in ("none", "as published") if has_dropout else ("none",):
            model.train(mode != "none")

            def run(mode: str = mode) -> None:
                with context():
                    loss, norm = (float(value) for value in step())  # also compiles
                    if mode == "none":
                        self.check(variant, loss, norm)
                    self.time(variant, mode, step, loss)

            self.attempt(variant, run, mode)

    def time(self, variant: str, mode: str, step: Step, loss: float) -> None:
        steps, rounds = (1, 1) if self.tiny else (STEPS, ROUNDS)
        for _ in range(WARM_UP):
            self.wait()
            began = time.perf_counter()
            step()
        self.wait()
        if self.quick and not self.tiny:
            is_long = time.perf_counter() - began > LONG_STEP
            steps, rounds = STEPS if is_long else 2 * STEPS, 1
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(rounds):
            self.wait()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            self.wait()
            seconds.append((time.perf_counter() - began) / steps)
        self.show(
            variant,
            mode,
            *self.speed(statistics.median(seconds)),
            self.peak_memory(),
            f"{loss:.4f}",
        )

    def speed(self, seconds: float) -> list[str]:
        work = self.workload
        mfu = "–" if work.precision == "fp32" else f"{self.flops / seconds / self.peak:.1%}"
        return [
            f"{1000 * seconds:.1f}",
            f"{work.batch / seconds:.1f}",
            f"{work.tokens / seconds:,.0f}",
            mfu,
        ]


def make_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """Returns a function that takes a step, and returns its loss and gradient norm, which nobody has waited for."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)

    def step() -> tuple[Tensor, Tensor]:
        dropout_state.set(1, 0)
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    return step


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compiles the blocks of a model of transformers: the children of its outermost module lists."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    for name in outermost:
        for block in model.get_submodule(name):
            block.compile(backend=backend)


def measure_theirs(bench: Bench, folder: str) -> None:
    """Times transformers' model, after writing its weights to a folder."""
    model = build(bench.workload, bench.config, bench.device)
    model.save_pretrained(folder)
    bench.measure("transformers, SDPA", model, nullcontext)
    if bench.quick:
        return
    if bench.device == "cuda" and importlib.util.find_spec("flash_attn"):
        model.set_attn_implementation("flash_attention_2")
        bench.measure("transformers, flash_attention_2", model, nullcontext)
        model.set_attn_implementation("sdpa")
    else:
        bench.measure(
            "transformers, SDPA's flash kernel",
            model,
            lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        )
    if bench.workload.compiled:
        compile_blocks(model, backend_of(bench))
        bench.measure("transformers, compiled blocks", model, nullcontext)


def measure_ours(bench: Bench, folder: str) -> None:
    """Times the zoo's model of the same weights."""
    model = shardzoo.from_pretrained(folder, dtype=bench.workload.dtype).to(bench.device)
    bench.measure("shardzoo", model, nullcontext)
    if bench.workload.compiled and not bench.quick:
        compile_model(model, backend_of(bench))
        bench.measure("shardzoo, compiled blocks", model, nullcontext)


def measure_compiled_blocks(bench: Bench, folder: str) -> None:
    """Times the zoo's model with compiled blocks alone, with and without dropout."""
    model = build(bench.workload, bench.config, bench.device)
    model.save_pretrained(folder)
    ours = shardzoo.from_pretrained(folder, dtype=bench.workload.dtype).to(bench.device)
    compile_model(ours, backend_of(bench))
    bench.measure("shardzoo, compiled blocks", ours, nullcontext)


def backend_of(bench: Bench) -> str:
    return "eager" if bench.tiny else "inductor"


class Clock(SilentReporter):
    """Notes when steps were logged, and ends the run."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.ends: list[float] = []
        self.loss = 0.0

    def training(self, step: int, values: dict[str, float]) -> None:
        self.ends.append(time.perf_counter())
        self.loss = values["loss"]
        if len(self.ends) == self.calls:
            raise Enough


def measure_trainer(bench: Bench, weights: str, *, cuda_graph: bool = False) -> None:
    """Times the trainer's own loop, and compares its peak memory with the estimate.

    Args:
        cuda_graph: Whether a step is recorded once, and queued as a whole then.
    """
    work, steps = bench.workload, 1 if bench.tiny else STEPS
    clock = Clock(1 + (1 if bench.tiny else ROUNDS))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            pytorch_device="cuda:0" if bench.device == "cuda" else "cpu", micro_batch_size=work.batch, lr=1e-4,
            weight_decay=0.01, precision=work.precision, tf32=work.tf32, train_steps=1000, log_interval=steps,
            save_dir=folder, cuda_graph=cuda_graph,
        )  # fmt: skip
        try:
            model = shardzoo.from_pretrained(weights, dtype=work.dtype)
            trainer.train(
                model, train_dataset=Samples(work, bench.config.vocab_size), reporter=clock
            )
        except Enough:
            pass
    seconds = statistics.median(
        after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)
    )
    seconds /= steps
    bench.show(
        "shardzoo's trainer, CUDA graph" if cuda_graph else "shardzoo's trainer",
        "as published",
        *bench.speed(seconds),
        bench.peak_memory(),
        f"{clock.loss:.4f}",
    )
    if cuda_graph:
        return
    job = Job(
        micro_batch_size=work.batch, length=work.length, target_length=work.target or None, padded=work.masked,
        precision=work.precision, device=bench.device,
    )  # fmt: skip
    lines = estimate(bench.config, job).peak.lines
    predicted = sum(
        value for name, value in lines.items() if name != "framework"
    )  # which PyTorch does not allocate
    measured = torch.cuda.max_memory_allocated() if bench.device == "cuda" else None
    ratio = f"{measured / predicted:.3f}" if measured else "–"
    bench.memory.append(["trainer", bench.peak_memory(), f"{predicted / GIB:.2f}", ratio])
    bench.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(WORKLOADS), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, and one step of each variant"
    )
    parser.add_argument(
        "--quick", action="store_true", help="each side as it comes, and the trainer of two models"
    )
    parser.add_argument("--compiled", action="store_true", help="only our compiled blocks")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench = Bench(options.model, options.device, options.tiny, options.json, quick=options.quick)
    torch.set_float32_matmul_precision("high" if bench.workload.tf32 else "highest")
    with tempfile.TemporaryDirectory() as folder:
        if options.compiled:
            bench.attempt("shardzoo", lambda: measure_compiled_blocks(bench, folder))
            return int(bench.wrong)
        bench.attempt("transformers", lambda: measure_theirs(bench, folder))
        bench.attempt("shardzoo", lambda: measure_ours(bench, folder))
        if not options.quick or options.model in TRAINED:
            bench.attempt("shardzoo's trainer", lambda: measure_trainer(bench, folder))
        if options.model in RECORDED:
            record = lambda: measure_trainer(bench, folder, cuda_graph=True)  # noqa: E731
            bench.attempt("shardzoo's trainer, CUDA graph", record)
    return int(bench.wrong)


if __name__ == "__main__":
    sys.exit(main())
