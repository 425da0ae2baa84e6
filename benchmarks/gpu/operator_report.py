"""A plugin of pytest that keeps a table of the tests so far, so that a run that is ended early leaves what it found.

    SHARDZOO_TEST_REPORT=FILE python -m pytest -p benchmarks.gpu.operator_report …

Failures are printed where they happen, with their first line.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import save, table

COLUMNS = ("test", "passed", "failed", "first failure")
VARIANT = re.compile(r"\b(cpp|cuda|triton)\b")
SECONDS_BETWEEN_FILES = 1.0


class Tally:
    """How many tests of each function passed and failed, by variant of the kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.written = 0.0

    def add(self, report: Any) -> None:
        """Counts a test that has ended."""
        if report.when != "call" and not report.failed:
            return
        name = report.nodeid.rpartition("::")[2]
        function, _, case = name.partition("[")
        variant = VARIANT.search(case)
        group = f"{function}, {variant[0]}" if variant else function
        if report.failed:
            self.failed[group] += 1
            self.first.setdefault(group, f"{name}: {first_line(report)}")
            print(f"\nFAILED {name}: {first_line(report)}", flush=True)
        else:
            self.passed[group] += report.passed
        if report.failed or time.monotonic() - self.written > SECONDS_BETWEEN_FILES:
            self.write()

    def write(self) -> None:
        """Writes the table as the other parts of a call write theirs."""
        groups = sorted(self.passed | self.failed)
        rows = [
            [group, str(self.passed[group]), str(self.failed[group]), self.first.get(group, "")]
            for group in groups
        ]
        save(self.path, [table("Operators beside fp64", COLUMNS, rows)])
        self.written = time.monotonic()


def first_line(report: Any) -> str:
    """Returns the line that says why a test failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return text.strip().partition("\n")[0][:200]


def pytest_configure(config: Any) -> None:
    """Begins the table, in the process that hears of all tests alone."""
    path = os.environ.get("SHARDZOO_TEST_REPORT")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Listener(Tally(Path(path))))


class Listener:
    """Hands the results of tests to a tally."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tally.add(report)

    def pytest_sessionfinish(self) -> None:
        self.tally.write()
