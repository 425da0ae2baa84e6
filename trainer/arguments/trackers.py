"""Lists the experiment trackers that `report_to` may name.

`logging/trackers.py` has their classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

# Tracker -> the package that it needs beside the trainer's own.
TRACKER_PACKAGES = {"tensorboard": None, "wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}


def checked_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the trackers of `report_to`, each once.

    Raises ValueError for another name, or a tracker whose package is missing.
    """
    found = tuple(dict.fromkeys("comet" if name == "comet_ml" else name for name in names))
    if found == ("none",):
        return ()
    for name in found:
        if name not in TRACKER_PACKAGES:
            raise ValueError(
                f"report_to must name trackers of {', '.join(TRACKER_PACKAGES)}, or be none; it "
                f"names {name!r}"
            )
        package = TRACKER_PACKAGES[name]
        if package is None:
            continue
        spec = find_spec(package)
        # find_spec also finds a folder of that name, which has no origin.
        if spec is None or spec.origin is None:
            raise ValueError(f"report_to={name} needs the package {package}: pip install {package}")
    return found
