"""The environment in which tests start commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BIN = Path(sys.executable).parent  # of this interpreter, and of the programs installed beside it
PLACE_IN_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def user_environment(*folders: Path, **variables: str | None) -> dict[str, str]:
    """That of this process outside of any job: programs are looked for in `folders` first, and then in `BIN`.

    variables: others to set, or to remove where None.
    """
    path = ":".join([*map(str, folders), str(BIN), os.environ["PATH"]])
    chosen = {**os.environ, "PATH": path, **dict.fromkeys(PLACE_IN_A_JOB), **variables}
    return {name: value for name, value in chosen.items() if value is not None}
