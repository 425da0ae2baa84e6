"""Tries a release as its users do: from an index, in fresh environments, without a compiler, in any folder.

    python tests/release.py FOLDER PYTHON [PYTHON ...]   FOLDER holds the distributions, PYTHON is an interpreter
    python tests/release.py --installed                  only tries what this interpreter has installed

For each Python it makes a virtual environment, installs shardzoo from FOLDER, served as a package index, and its
dependencies from pip's usual index; then it pretrains for some steps at TP=2, converts, and generates.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from local_index import local_index  # noqa: E402

PROMPT = "def __init__(self"
SHELL = tempfile.TemporaryDirectory()  # holds bash alone, in which DeepSpeed's set-up runs commands


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="the folder of the wheel and the source distribution"
    )
    parser.add_argument("pythons", nargs="*", help="interpreters")
    parser.add_argument(
        "--installed", action="store_true", help="try the package of this interpreter"
    )
    arguments = parser.parse_args()
    if arguments.installed == bool(arguments.folder and arguments.pythons):
        parser.error("name a folder and at least one Python, or give --installed")
    (Path(SHELL.name) / "bash").symlink_to(shutil.which("bash") or "/bin/bash")
    if arguments.installed:
        with tempfile.TemporaryDirectory() as folder:
            try_commands(Path(sys.executable).parent, Path(folder))
    for python in arguments.pythons:
        with tempfile.TemporaryDirectory() as folder:
            try_commands(install(arguments.folder, python, Path(folder)), Path(folder))


def install(distributions: Path, python: str, folder: Path) -> Path:
    """Installs the newest shardzoo of a folder into a new environment. Returns the folder of its programs."""
    programs, index = folder / "environment" / "bin", folder / "index"
    subprocess.run([python, "-m", "venv", str(folder / "environment")], check=True)
    index.mkdir()
    with local_index(distributions, index) as address:
        command = [
            programs / "pip",
            "install",
            "--quiet",
            "--extra-index-url",
            address,
            "--only-binary",
            "shardzoo",
        ]
        version = "import sys; print('%d.%d' % sys.version_info[:2])"
        own = ROOT / f"constraints-{run(programs, folder, 'python', '-c', version).strip()}.txt"
        constraints = own if own.exists() else ROOT / "constraints.txt"
        command += ["--constraint", constraints]
        run(programs, folder, *command, "shardzoo", DS_BUILD_OPS="0")
    return programs


def try_commands(programs: Path, folder: Path) -> None:
    """Runs what the README shows after an installation, in folders that hold nothing."""
    here, elsewhere = folder / "here", folder / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    say(
        run(programs, here, "shardzoo", "--version").strip(),
        run(programs, here, "python", "--version").strip(),
    )
    for command in (["python", "-c", "import shardzoo"], ["shardzoo", "--help"]):
        started = time.perf_counter()
        run(programs, here, *command)
        say(f"{' '.join(command)}: {time.perf_counter() - started:.2f} s")
    report = run(programs, here, "shardzoo", "doctor")
    for fact in ("built with", "ranks of one host exchange CPU tensors through it"):
        if fact not in report:
            raise SystemExit(f"the compiled parts are missing:\n{report}")
    run(
        programs,
        here,
        "shardzoo",
        "pretrain",
        "--tp",
        "2",
        "--fast-dev-run",
        "--output-dir",
        "quick",
    )
    module = [
        "deepspeed",
        "--module",
        "shardzoo.pretrain",
        "--model-parallel-size",
        "2",
        "--fast-dev-run",
    ]
    run(programs, here, *module, "--output-dir", "again")
    model = str(here / "quick" / "hf")
    run(programs, elsewhere, "shardzoo", "convert", "split", model, "shards", "--tp", "2")
    for source in (model, "shards"):
        words = ["--prompt", PROMPT, "--max-new-tokens", "8", "--tp", "2"]
        text = json.loads(
            run(programs, elsewhere, "shardzoo", "generate", "--model", source, *words)
        )
        say(f"generated from {Path(source).name}: {json.dumps(text)}")


def run(programs: Path, folder: Path, *command: str | Path, **environment: str) -> str:
    """Runs a program of an environment; returns its output. Beside these only a shell is on the path: no compiler."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CXX", "NVCC", "CUDA_HOME")
    }
    kept |= {"PATH": f"{programs}:{SHELL.name}", "PYTHONNOUSERSITE": "1", **environment}
    program = str(programs / command[0])
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, env=kept, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def say(*words: str) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    main()
