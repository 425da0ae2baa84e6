"""docs/adding-a-model.md, tried: the files on that page, put into a copy of the package, are a whole family."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import user_environment
from documents import ROOT

FILE = re.compile(
    r"^`models/starcoder2/(\w+\.py)`\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def package_with(folder: Path, files: dict[str, str]) -> None:
    """Makes `folder` a package like shardzoo, of links to its files, with one more family."""
    (folder / "models" / "starcoder2").mkdir(parents=True)
    made = ("models", "registry.py", "tests", "runs", "__pycache__")
    for source, place in ((ROOT, folder), (ROOT / "models", folder / "models")):
        for entry in source.iterdir():
            if entry.name not in made and not entry.name.startswith("."):
                (place / entry.name).symlink_to(entry)
    for name, text in files.items():
        (folder / "models" / "starcoder2" / name).write_text(text)
    registry = (ROOT / "models" / "registry.py").read_text()
    registry = registry.replace("    roberta,\n", "    roberta,\n    starcoder2,\n", 1)
    registry = registry.replace(
        "    roberta.FAMILY,\n", "    roberta.FAMILY,\n    starcoder2.FAMILY,\n", 1
    )
    assert registry.count("starcoder2") == 2
    (folder / "models" / "registry.py").write_text(registry)


@pytest.mark.before_release
def test_the_files_of_the_page_are_a_whole_family(tmp_path):
    files = dict(FILE.findall((ROOT / "docs" / "adding-a-model.md").read_text()))
    assert len(files) == 6
    package_with(tmp_path / "shardzoo", files)
    (tmp_path / "checks").mkdir()
    script = ROOT / "tests" / "harness" / "new_family.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "checks")],
        env=user_environment(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starcoder2-7b" in done.stdout
