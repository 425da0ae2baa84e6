"""Builds the compiled kernels for this machine's GPU, or says which library is used where there is no nvcc.

    python benchmarks/gpu/build_kernels.py --device cuda --json FILE

A library that was built elsewhere fits any GPU of its architectures and any PyTorch since 2.11 (docs/kernels.md), so
without nvcc the one in ops/ is left alone: csrc/build.py would replace it by one without CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "csrc"))

import torch
from device_training import options_of
from report import save, table

from build import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "ops" / "_kernels.so"


def main() -> int:
    options, began = options_of(__doc__ or ""), time.monotonic()
    environment, nvcc = {**os.environ}, find_nvcc()
    if options.device == "cpu":
        environment["SHARDZOO_BUILD"] = "skip"
    elif nvcc is None:
        if not LIBRARY.exists():
            print(
                "there is neither nvcc nor a library that was built elsewhere, ops/_kernels.so",
                file=sys.stderr,
            )
            return 1
        save(
            options.json,
            [
                table(
                    "Build",
                    ("library", "seconds"),
                    [["built elsewhere: there is no nvcc here", "–"]],
                )
            ],
        )
        return 0
    else:
        major, minor = torch.cuda.get_device_capability()
        environment |= {"SHARDZOO_BUILD": "required", "SHARDZOO_CUDA": "1", "NVCC": nvcc}
        environment.setdefault("SHARDZOO_CUDA_ARCHS", f"{major}{minor}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "csrc" / "build.py")], cwd=ROOT, env=environment
    )
    architectures = environment.get("SHARDZOO_CUDA_ARCHS", "none, in a dry run")
    rows = [[f"CUDA architectures: {architectures}", f"{time.monotonic() - began:.0f}"]]
    save(options.json, [table("Build", ("library", "seconds"), rows)])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
