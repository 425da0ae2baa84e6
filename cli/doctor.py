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
from rich.console import Console

from ..mpu import shared_memory
from ..ops import current_choice, library, variants
from ..trainer.logging.provenance import hardware, versions
from .help import HelpPage, show_help
from .parsing import parse_words


@dataclass
class Doctor:
    """Show what is built, which kernels run on each device, and why the others do not."""


HELP = HelpPage("shardzoo doctor", Doctor)


def main(argv: list[str]) -> int:
    """Prints the report. Returns 0, or 1 if SHARDZOO_KERNELS forces kernels that cannot run here."""
    show_help(HELP, argv)
    parse_words(Doctor, argv, HELP.program)
    console = Console(highlight=False, soft_wrap=True)
    kernels = describe_kernels()
    sections = {
        "Machine": describe_machine(),
        "Compiled parts": describe_compiled_parts(),
        "Kernels": kernels,
    }
    for title, facts in sections.items():
        console.print(f"[bold]{title}[/bold]")
        for name, value in facts.items():
            console.print(f"  {name:<22}", end="")
            console.print(value, markup=False)
    if any("cannot run here" in value for value in kernels.values()):
        return 1
    return 0


def describe_machine() -> dict[str, str]:
    """Returns the versions, the hardware, and the compilers that a build would find."""
    facts = {**versions(), **hardware()}
    has_triton = importlib.util.find_spec("triton") is not None
    facts["triton"] = "installed" if has_triton else "not installed"
    facts["C++ compiler"] = find_compiler()
    facts["nvcc"] = find_nvcc()
    if platform.system() == "Linux":
        if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":
            facts["huge pages"] = "on"
        else:
            facts["huge pages"] = (
                "off (THP_MEM_ALLOC_ENABLE=1 makes CPU tensors 2 to 4 times faster)"
            )
    return facts


def find_compiler() -> str:
    """Returns the C++ compiler that a build would use, or a text that says there is none."""
    named = os.environ.get("CXX")
    if named:
        return named
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    return "none on PATH"


def find_nvcc() -> str:
    """Returns nvcc's path and release, or a text that says there is none."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "none on PATH"
    lines = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.splitlines()
    release = next((line for line in lines if "release" in line), "of unknown release")
    return f"{nvcc}, {release}"


def describe_compiled_parts() -> dict[str, str]:
    """Returns what the compiled modules were built with, or why they are missing."""
    error = library.load_error()
    facts = {"kernel library": error or str(library.COMPILED)}
    if error is None:
        facts["CPU instructions"] = library.cpu_isa()
        if library.has_cuda_kernels():
            facts["CUDA kernels"] = "built in"
        else:
            facts["CUDA kernels"] = "not built in (no working nvcc, or switched off)"
        facts["built with"] = library.build_info()
    else:
        facts["to build"] = (
            "pip install --no-build-isolation --force-reinstall --no-deps <source folder>"
        )
    if shared_memory.compiled:
        facts["shared memory"] = "built in: ranks of one host exchange CPU tensors through it"
    else:
        facts["shared memory"] = (
            "not built: ranks of one host exchange CPU tensors through sockets, "
            "3 to 100 times slower"
        )
    return facts


def describe_kernels() -> dict[str, str]:
    """Returns which variant runs on each device type, and why the others do not."""
    facts = {"SHARDZOO_KERNELS": current_choice()}
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    for device in devices:
        try:
            facts[f"{device} tensors"] = variants.choose_variant(device)
        except RuntimeError as error:
            facts[f"{device} tensors"] = str(error)
        for variant in variants.VARIANTS[1:]:
            reason = variants.unavailable(variant, device)
            facts[f"  {variant}"] = "available" if reason is None else f"no: {reason}"
    return facts
