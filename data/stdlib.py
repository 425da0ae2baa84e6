"""The default corpus: source code that every machine with Python has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

# Third-party packages are not the standard library; test folders hold deliberately odd files.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def python_stdlib() -> list[Path]:
    """All `.py` files of the running interpreter's standard library, sorted (about 13 MB of text)."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(f"this interpreter has no standard library source under {root}; give a corpus of your own")
    return sorted(found)
