"""A folder of its own for a run that was given none."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path


def make_run_folder(model: str) -> Path:
    """Makes runs/MODEL-TIME, with a number behind it where a run that began in the same second has that name."""
    named = Path("runs", f"{Path(model).name}-{datetime.now():%Y%m%d-%H%M%S}")
    named.parent.mkdir(exist_ok=True)
    folder = named
    for number in count(2):
        try:
            folder.mkdir()
            break
        except FileExistsError:
            folder = named.with_name(f"{named.name}-{number}")
    return folder
