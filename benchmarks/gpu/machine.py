"""Describes the machine and its versions, and refuses one without the device that is asked for.

    python benchmarks/gpu/machine.py --device cuda --json FILE

The exit code is 2 if there is no such device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "deepspeed",
    "flash-attn",
    "liger-kernel",
    "quack-kernels",
)


def version(name: str) -> str:
    """Returns the version of an installed distribution, or "missing"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def last_line(*words: str) -> str:
    """Returns the last line that a program prints, or "missing" if it does not run."""
    program = shutil.which(words[0])
    if program is None:
        return "missing"
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if lines else "missing"


def facts(device: str) -> dict[str, Any]:
    """Returns what results depend on besides the code."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    found |= {name: version(name) for name in PACKAGES}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": properties.name,
            "GPUs": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "L2 MiB": round(properties.L2_cache_size / 2**20),
            "CUDA of torch": torch.version.cuda,
            "driver": last_line(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            "nvcc": last_line(os.environ.get("NVCC", "nvcc"), "--version"),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "PyTorch finds no GPU here; --dry-run runs everything on the CPU in tiny sizes",
            file=sys.stderr,
        )
        return 2
    options.json.write_text(json.dumps(facts(options.device), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
