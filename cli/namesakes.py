"""Says that a preset is taken where a folder of the same name could be meant."""

from __future__ import annotations

import sys
from pathlib import Path

from ..checkpoint.folder_files import CONFIG
from ..files.verbosity import is_quiet
from ..models import presets


def tell_of_namesake(model: str | None) -> None:
    """Prints a notice if `model` is a preset and also a model's folder in the current folder."""
    if model is None or is_quiet() or not Path(model, CONFIG).is_file():
        return
    if any(model == preset for preset, _ in presets()):
        print(
            f"notice: {model} is the preset; for the folder of that name write ./{model}",
            file=sys.stderr,
        )
