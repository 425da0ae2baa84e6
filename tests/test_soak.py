"""A short run of `benchmarks/soak.py`, which breaks training, conversion and preparation at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import user_environment

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.before_release
def test_faults_change_nothing(tmp_path):
    """One layout of each kind of work; the whole soak has all."""
    goals = ["--training", "4", "--conversion", "6", "--preparation", "4", "--seconds", "60"]
    jobs = [
        "--jobs",
        "DDP",
        "split",
        "1 worker",
        "--folder",
        str(tmp_path),
        "--report",
        str(tmp_path / "report.json"),
    ]
    done = subprocess.run(
        [sys.executable, str(SOAK), *goals, *jobs],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    assert {row["group"] for row in report["rows"]} == {"training", "conversion", "preparation"}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
