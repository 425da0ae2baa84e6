"""A short run of `benchmarks/soak.py`, which breaks training, conversion and preparation at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from commands import user_environment
from every_case import EVERY_CASE

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def test_faults_change_nothing(tmp_path):
    """One layout of each kind of work; the whole soak has all."""
    faults = ("4", "6", "4") if EVERY_CASE else ("1", "2", "1")
    goals = ["--training", faults[0], "--conversion", faults[1], "--preparation", faults[2], "--seconds", "60"]
    jobs = ["--jobs", "DDP", "split", "1 worker", "--folder", str(tmp_path), "--report", str(tmp_path / "report.json")]
    done = subprocess.run(
        [sys.executable, str(SOAK), *goals, *jobs], env=user_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    assert {row["group"] for row in report["rows"]} == {"training", "conversion", "preparation"}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
