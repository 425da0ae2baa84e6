"""Names the packages that the calls of benchmarks/gpu.sh need, says which are missing, and installs those from wheels.

    python benchmarks/gpu/packages.py [--names]     # lists what is missing, or what wheels are gathered of

Runs on a bare image, so it imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# What an image for machine learning has.
BARE = {
    "torch": "torch", "triton": "triton", "transformers": "transformers", "safetensors": "safetensors",
    "tokenizers": "tokenizers", "numpy": "numpy", "yaml": "PyYAML", "filelock": "filelock", "rich": "rich",
    "pytest": "pytest",
}  # fmt: skip
# Import name -> distribution, with the packages that it imports.
COMMANDS = {
    "tyro": "tyro", "docstring_parser": "docstring_parser", "typeguard": "typeguard",
    "typing_extensions": "typing_extensions",
}  # fmt: skip
DEEPSPEED = {
    "deepspeed": "deepspeed", "einops": "einops", "hjson": "hjson", "msgpack": "msgpack", "ninja": "ninja",
    "packaging": "packaging", "psutil": "psutil", "cpuinfo": "py-cpuinfo", "pydantic": "pydantic",
    "pydantic_core": "pydantic_core", "annotated_types": "annotated-types", "typing_inspection": "typing-inspection",
    "tqdm": "tqdm",
}  # fmt: skip
BUILD = {"setuptools": "setuptools"}
TESTS = {"cloudpickle": "cloudpickle", "xdist": "pytest-xdist", "execnet": "execnet"}
REQUIRED = BARE | COMMANDS
ALL = REQUIRED | DEEPSPEED | BUILD | TESTS


def missing(packages: Iterable[str]) -> list[str]:
    """Returns the import names among `packages` that this interpreter does not find."""
    importlib.invalidate_caches()
    return [name for name in packages if importlib.util.find_spec(name) is None]


def describe(names: Iterable[str]) -> str:
    """Returns the distributions of these import names, as text."""
    return ", ".join(ALL[name] for name in names)


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def wheels_for(folder: Path) -> list[Path]:
    """Returns the wheels of a folder that this interpreter does not have in the same version."""
    found = importlib.metadata.distributions()
    known = {
        (normalized(one.metadata["Name"]), one.version) for one in found if one.metadata["Name"]
    }
    named = {wheel: wheel.name.split("-") for wheel in sorted(folder.glob("*.whl"))}
    return [
        wheel
        for wheel, (name, version, *_) in named.items()
        if (normalized(name), version) not in known
    ]


def install(folder: Path, site: Path, python: str) -> list[str]:
    """Installs from a folder of wheels, into `site`, what is not here in the same version. Returns the wheels' names.

    Raises ValueError if the folder has no wheels, and CalledProcessError if pip fails.
    """
    if not any(folder.glob("*.whl")):
        raise ValueError(f"WHEELS={folder} has no *.whl; benchmarks/gpu_wheels.sh gathers them")
    wheels = wheels_for(folder)
    if wheels:
        words = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(site),
        ]
        subprocess.run([*words, *map(str, wheels)], check=True)
    return [wheel.name for wheel in wheels]


def main(words: list[str]) -> int:
    if words[:1] == ["--names"]:
        print(
            *(value for name, value in ALL.items() if name not in BARE and name != "deepspeed"),
            sep="\n",
        )
        return 0
    lacking = missing(ALL)
    print(f"missing: {describe(lacking)}" if lacking else "no package is missing")
    return int(bool(missing(REQUIRED)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
