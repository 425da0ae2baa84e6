"""Compiles the Triton kernels of `benchmarks/gpu.sh first` on a machine without a GPU, into a cache to carry there.

    python benchmarks/gpu/compile_ahead.py --cache FOLDER [--architecture 90]

A GPU that is lent for minutes need not spend them on compiling. The cache holds for the same version of Triton, and for
one path: unpack it on the machine with the GPU where it was made here, and run there with TRITON_CACHE_DIR=FOLDER.
A driver stands in for a device of that architecture. The operators, tests and models of the call run on CPU tensors
and launch nothing, so their results are meaningless and not looked at; what they would launch is compiled. Kernels that
were missed are compiled on the GPU as always.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
os.environ["SHARDZOO_TEST_DEVICE"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "harness"))

import matrix
import pytest
import torch
import triton
from device_parity import compare
from train_run import MEDIUM, Samples
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from workloads import WORKLOADS, Workload, batch_of, build

import shardzoo
from shardzoo import ops
from shardzoo.models import find_config, from_config
from shardzoo.mpu import dropout_state
from shardzoo.ops import variants
from shardzoo.ops.bench import cases
from shardzoo.ops.registration import Op
from shardzoo.ops.triton_kernels import attention

ROOT = Path(__file__).resolve().parents[2]
TESTS = "attention_matches or (triton and (40x130 or 64x4096 or reproducible))"
LENGTHS = (1024, 4096)  # of the part `attention`
PARTS = ("operators", "families", "training", "attention", *(f"steps_{name}" for name in WORKLOADS))
KEPT = (".cubin", ".json")  # of a kernel's files, what is read to run it
# One layer has all the kernels of a model, and the vocabulary has none of Triton.
FEW = {
    "n_layer": 1,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def only_compile(kernel: Any, grid: Any) -> Callable[..., None]:
    """Stands for the subscript of a kernel: what it returns compiles and launches nothing."""

    def launch(*arguments: Any, **options: Any) -> None:
        kernel.run(*arguments, grid=grid, warmup=True, **options)

    return launch


def choose_precision(device: torch.device) -> str:
    """Returns how attention multiplies fp32 factors on a GPU."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@contextlib.contextmanager
def stand_in(architecture: int) -> Generator[None]:
    """Within the context, CPU tensors pass for a GPU's where Triton's kernels are chosen."""
    target = GPUTarget("cuda", architecture, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    with (
        patch.object(triton.runtime.jit.KernelInterface, "__getitem__", only_compile),
        patch.object(variants, "triton_unavailable", lambda device_type: None),
        patch.object(attention, "_precision", choose_precision),
    ):
        yield


@contextlib.contextmanager
def choosing_as_on_a_gpu() -> Generator[None]:
    """Within the context, operators without a CUDA kernel run in Triton, as `auto` has them on a GPU."""

    def choose(op: Op, device_type: str) -> str:
        return "triton" if "triton" in op.variants else "reference"

    with (
        patch.object(variants, "choose_variant", lambda device_type: "cuda"),
        patch.object(Op, "_choose_other_variant", choose),
    ):
        yield


class NotInterpreted:
    """A plugin of pytest: the tests have Triton interpreted where there is no GPU."""

    def pytest_collection_finish(self) -> None:
        os.environ["TRITON_INTERPRET"] = "0"


def run_tests() -> None:
    """Runs the operators' tests; they fail, because nothing is launched."""
    words = ["-q", "--tb=no", "--no-summary", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*words, str(ROOT / "tests/ops/test_gpu.py"), "-k", TESTS], [NotInterpreted()])


def run_families() -> None:
    """Runs one architecture of each family as the part `families` does."""
    families = {name: family for name, (family, _) in matrix.load_rows().items()}
    first = {family: name for name, family in reversed(families.items())}
    with patch.object(matrix, "BATCHES", 2):  # all have the same shape
        for name in first.values():
            compare(name, "cpu", True)


def step(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Runs a model's forward and backward pass with and without dropout."""
    for trains in (True, False):
        model.train(trains)
        dropout_state.set(1, 0)
        model(**batch).loss.backward()


def run_training() -> None:
    """Runs the small GPT-2 of the part `training`."""
    config = find_config("gpt2").with_changes(
        vocab_size=1000, bos_token_id=0, eos_token_id=0, **MEDIUM
    )
    for dtype in (torch.float32, torch.bfloat16):
        samples = [Samples(MEDIUM["n_positions"])[index] for index in range(8)]
        batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        step(from_config(config).to(dtype), batch)


def run_attention() -> None:
    """Runs the operators of the part `attention`."""
    for length in LENGTHS:
        size = (32768 // length, 16, length, 64)
        for name in ("attention", "attention_causal", "attention_bias"):
            # The others' bias, which is written out, would take gigabytes.
            with patch.object(cases, "lay_out_diagonals", lambda bias, *_: bias[:, :1, None]):
                case = cases._attention(name, size)
                tensors = case.make("cpu", torch.bfloat16)
            inputs = {
                name: tensor.detach().requires_grad_(name in case.leaves)
                for name, tensor in tensors.items()
            }
            out = case.ours(inputs)
            torch.autograd.grad(out, [inputs[name] for name in case.leaves], torch.ones_like(out))


def run_workload(workload: Workload) -> None:
    """Runs a model of one layer on the batch of a measured step."""
    values = workload.config(False).to_dict()
    few = {name: value for name, value in FEW.items() if values.get(name) is not None}
    workload = replace(workload, changes={}, sizes=few)
    torch.set_float32_matmul_precision("high" if workload.tf32 else "highest")
    config = workload.config(True)
    with tempfile.TemporaryDirectory() as folder:
        build(workload, config, "cpu").save_pretrained(folder)
        model = shardzoo.from_pretrained(folder, dtype=workload.dtype)
    step(model, batch_of(workload, config.vocab_size, "cpu"))
    torch.set_float32_matmul_precision("highest")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the compiled kernels")
    parser.add_argument("--architecture", type=int, default=90, help="such as 80 or 90")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the call")
    options = parser.parse_args()
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    began = time.monotonic()

    def tell(name: str) -> None:
        count = sum(1 for _ in cache.glob("*/*.cubin"))
        print(f"{name}: {count} kernels, {time.monotonic() - began:.0f} s", flush=True)

    def run(name: str, run_part: Callable[[], None]) -> None:
        if name in options.parts:
            run_part()
            tell(name)

    ops.library.missing_kernels("cpu")  # loads the compiled kernels
    with stand_in(options.architecture):
        run("operators", run_tests)
        with choosing_as_on_a_gpu():
            run("families", run_families)
            run("training", run_training)
            run("attention", run_attention)
            for name, workload in WORKLOADS.items():
                run(f"steps_{name}", lambda workload=workload: run_workload(workload))
    for path in cache.glob("*/*"):
        if path.suffix not in KEPT:
            path.unlink(missing_ok=True)  # another run of this program may have been quicker
    size = sum(path.stat().st_size for path in cache.glob("*/*") if path.suffix in KEPT)
    print(f"{cache}: {size / 1e6:.0f} MB; TRITON_CACHE_DIR={cache} where the GPU is")
    return 0


if __name__ == "__main__":
    sys.exit(main())
