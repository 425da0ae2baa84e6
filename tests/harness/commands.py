"""The environment in which tests start commands."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

BIN = Path(sys.executable).parent  # of this interpreter, and of the programs installed beside it
PLACE_IN_A_JOB = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def user_environment(*folders: Path, **variables: str | None) -> dict[str, str]:
    """That of this process outside of any job: programs are looked for in `folders` first, and then in `BIN`.

    variables: others to set, or to remove where None.
    """
    path = ":".join([*map(str, folders), str(BIN), os.environ["PATH"]])
    chosen = {**os.environ, "PATH": path, **dict.fromkeys(PLACE_IN_A_JOB), **variables}
    return {name: value for name, value in chosen.items() if value is not None}


def warm_environment(*folders: Path, **variables: str | None) -> dict[str, str]:
    """`user_environment`, in which `python` and the scripts beside it start in no time: see warm_server.py.

    They do what they do for a user, but for the import of torch and for the process id that the one who starts them
    sees. Tests of kills and of other programs' signals take `user_environment`, which this is where there are GPUs: a
    copy of a process cannot use them once that has looked for them.
    """
    if torch.cuda.is_available():
        return user_environment(*folders, **variables)
    return user_environment(*folders, warm_programs(), **variables)


@cache
def warm_programs() -> Path:
    """A folder of stand-ins for the programs beside the interpreter, and the server that runs what they stand for."""
    # No TemporaryDirectory: since Python 3.13 a forked process drops what is registered, and with it the folder.
    folder = tempfile.mkdtemp()
    programs, server = Path(folder, "bin"), Path(__file__).with_name("warm_server.py")
    programs.mkdir()
    path = str(Path(folder, "socket"))
    words = [sys.executable, str(server), path]
    process = subprocess.Popen(
        words,
        env=user_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.communicate)
    if b"ready\n" not in iter(
        process.stdout.readline, b""
    ):  # after what libraries print when they are imported
        raise RuntimeError("the server of warm programs did not start")
    stand_in = shlex.join(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("warm_python.py")), path]
    )
    for name in ("python", "python3", "deepspeed", "shardzoo", "torchrun"):
        (programs / name).write_text(f'#!/bin/sh\nexec {stand_in} {BIN / name} "$@"\n')
        (programs / name).chmod(0o755)
    return programs
