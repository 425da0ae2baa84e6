"""`shardzoo doctor`: shows what is built, which kernels run on each device, and why the others do
not.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch
import tyro
from rich.console import Console

from ..mpu import shared_memory
from ..ops import current_choice, library, variants
from ..trainer.logging.provenance import hardware, versions
from .help import HelpPage, show_help


@dataclass
class Doctor:
    """Show what is built, which kernels run on each device, and why the others do not."""


HELP = HelpPage("shardzoo doctor", Doctor)


def main(argv: list[str]) -> int:
    """Prints the report. Returns 0, or 1 if SHARDZOO_KERNELS forces kernels that cannot run here."""
    show_help(HELP, argv)
    tyro.cli(Doctor, args=argv, prog=HELP.program)
    console = Console(highlight=False, soft_wrap=True)
    for title, facts in (
        ("Machine", machine()),
        ("Compiled parts", compiled()),
        ("Kernels", used()),
    ):
        console.print(f"[bold]{title}[/bold]")
        for name, value in facts.items():
            console.print(f"  {name:<22}", end="")
            console.print(value, markup=False)
    return 1 if any("cannot run here" in value for value in used().values()) else 0


def machine() -> dict[str, str]:
    """Returns the versions, the hardware, and the compilers that a build would find."""
    facts = {
        **versions(),
        **hardware(),
        "triton": "installed" if importlib.util.find_spec("triton") else "not installed",
        "C++ compiler": os.environ.get("CXX")
        or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), "")
        or "none on PATH",
        "nvcc": nvcc_version(),
    }
    if platform.system() == "Linux":
        pages = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
        facts["huge pages"] = (
            "on" if pages else "off (THP_MEM_ALLOC_ENABLE=1 makes CPU tensors 2 to 4 times faster)"
        )
    return facts


def nvcc_version() -> str:
    """Returns nvcc's path and release, or a text that says there is none."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "none on PATH"
    lines = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.splitlines()
    release = next((line for line in lines if "release" in line), "of unknown release")
    return f"{nvcc}, {release}"


def compiled() -> dict[str, str]:
    """Returns what the compiled modules were built with, or why they are missing."""
    error = library.load_error()
    facts = {"kernel library": error or str(library.COMPILED)}
    if error is None:
        facts["CPU instructions"] = library.cpu_isa()
        facts["CUDA kernels"] = (
            "built in"
            if library.has_cuda_kernels()
            else "not built in (no working nvcc, or switched off)"
        )
        facts["built with"] = library.build_info()
    else:
        facts["to build"] = (
            "pip install --no-build-isolation --force-reinstall --no-deps <source folder>"
        )
    facts["shared memory"] = (
        "built in: ranks of one host exchange CPU tensors through it"
        if shared_memory.compiled
        else "not built: ranks of one host exchange CPU tensors through sockets, 3 to 100 times slower"
    )
    return facts


def used() -> dict[str, str]:
    """Returns which variant runs on each device type, and why the others do not."""
    facts = {"SHARDZOO_KERNELS": current_choice()}
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        try:
            facts[f"{device} tensors"] = variants.choose_variant(device)
        except RuntimeError as error:
            facts[f"{device} tensors"] = str(error)
        for variant in variants.VARIANTS[1:]:
            reason = variants.unavailable(variant, device)
            facts[f"  {variant}"] = "available" if reason is None else f"no: {reason}"
    return facts
