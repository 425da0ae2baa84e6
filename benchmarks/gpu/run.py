"""Runs the parts of a call of benchmarks/gpu.sh, each with a time limit, and reports after each of them.

A part that fails, hangs or lacks a package is reported and does not stop the others. The report is also written if the
call itself is ended early. The exit code is 0 if all parts pass, 1 if not, and 2 if nothing can run here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packages import ALL, REQUIRED, describe, install, missing
from parts import CALLS, LIMITS, LONGEST_CALL, WARM_CALLS, Part
from report import Outcome, write
from warm import WarmStart

ROOT = Path(__file__).resolve().parents[2]
NOTHING_RUNS = 2
DRY_CALL = (
    30 * 60
)  # seconds of a dry run, whose parts have no limits of their own: its CPU may be a slow one
GRACE = 5  # seconds from SIGTERM to SIGKILL


class Call:
    """The state of a call: what its parts are given, and how those that ran have ended."""

    def __init__(self, options: argparse.Namespace, site: Path) -> None:
        self.name, self.folder, self.dry = (
            options.call,
            Path(options.output).resolve(),
            options.dry_run,
        )
        self.python = os.environ.get("PYTHON") or sys.executable
        self.started = time.monotonic()
        self.longest = DRY_CALL if self.dry else LIMITS.get(self.name, LONGEST_CALL)
        self.outcomes: list[Outcome] = []
        self.facts: dict[str, Any] = {}
        self.running: subprocess.Popen[bytes] | None = None
        self.files = self.folder / self.name
        self.files.mkdir(parents=True, exist_ok=True)
        for path in self.files.iterdir():  # of an earlier call
            if path.suffix in (".json", ".log"):
                path.unlink()
        above = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        chosen = ("SHARDZOO_KERNELS", "TRITON_INTERPRET")
        self.environment = {name: value for name, value in os.environ.items() if name not in chosen}
        self.environment |= {
            "PYTHONPATH": ":".join(above),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.warm = WarmStart(ROOT, self.environment) if self.name in WARM_CALLS else None

    def run(self, part: Part) -> None:
        """Runs a part and notes how it ended."""
        lacking, left = (
            missing(part.needs),
            self.longest - GRACE - (time.monotonic() - self.started),
        )
        if lacking or left < GRACE:
            reason = (
                f"not run: {describe(lacking)} missing"
                if lacking
                else "not run: the call's time is over"
            )
            self.note(Outcome(part.name, reason, 0.0))
            return
        print(f"== {part.name}", flush=True)
        words, variables = (
            (part.dry, part.dry_environment) if self.dry else (part.words, part.environment)
        )
        began, limit = time.monotonic(), left if self.dry else min(part.seconds, left)
        with (self.files / f"{part.name}.log").open("wb") as log:
            code = self.wait([self.python, *words], self.environment | dict(variables), limit, log)
        outcome = (
            "passed"
            if code == 0
            else f"failed ({code})"
            if code is not None
            else f"ended after {limit:.0f} s"
        )
        self.note(Outcome(part.name, outcome, time.monotonic() - began))

    def wait(
        self, words: Sequence[str], environment: dict[str, str], limit: float, log: Any
    ) -> int | None:
        """Runs a program to its end; returns its exit code, or None if it had to be ended."""
        if self.warm is not None:
            return self.warm.run(words[1:], environment, limit, log)
        self.running = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return self.running.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end_running()

    def end_running(self) -> None:
        """Ends the running program and all that it has started."""
        if self.warm is not None:
            self.warm.end_running()
        process = self.running
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None or number == signal.SIGKILL:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue
        self.running = None

    def note(self, outcome: Outcome) -> None:
        """Prints how a part ended, and renews the report."""
        self.outcomes.append(outcome)
        log = self.files / f"{outcome.part}.log"
        print(f"   {outcome.part}: {outcome.outcome}, {outcome.seconds:.0f} s", flush=True)
        if outcome.outcome != "passed" and log.exists():
            lines = log.read_text(errors="replace").splitlines()[-5:]
            print("\n".join(f"   | {line}" for line in lines), flush=True)
        write(self.folder, self.name, self.facts, self.outcomes)


def prepare(call: Call, site: Path) -> str:
    """Installs missing packages from WHEELS and describes the machine. Returns why nothing can run here, or ""."""
    wheels = os.environ.get("WHEELS")
    if wheels and (names := install(Path(wheels).resolve(), site, call.python)):
        print(f"installed from {wheels}: {len(names)} wheels")
    sys.path.insert(0, str(site))
    if lacking := missing(ALL):
        print(
            f"missing packages: {describe(lacking)}. benchmarks/gpu_wheels.sh gathers them for WHEELS",
            flush=True,
        )
    if needed := missing(REQUIRED):
        return f"nothing runs without {describe(needed)}"
    path = call.files / "machine.json"
    words = [
        "benchmarks/gpu/machine.py",
        "--device",
        "cpu" if call.dry else "cuda",
        "--json",
        str(path),
    ]
    code, text = describe_machine(call, words)
    if code and call.warm is not None:
        # The imports may have touched the GPU, of which a copy of their process can make no use.
        print(f"parts start cold, because a warm one failed: {text[-300:]}", flush=True)
        call.warm = None
        code, text = describe_machine(call, words)
    if code:
        return text.splitlines()[-1] if text else f"the machine could not be described ({code})"
    if code is None:
        return "importing PyTorch and finding the GPU took more than 60 s"
    call.facts = json.loads(path.read_text())
    return ""


def describe_machine(call: Call, words: Sequence[str]) -> tuple[int | None, str]:
    """Runs benchmarks/gpu/machine.py; returns its exit code, None if it had to be ended, and its output."""
    with (call.files / "machine.log").open("w+b") as log:
        code = call.wait([call.python, *words], call.environment, 60, log)
        log.seek(0)
        return code, log.read().decode(errors="replace").strip()


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("call", choices=(*CALLS, "repair"))
    parser.add_argument(
        "--output", default=str(ROOT / "benchmarks/results/gpu"), help="folder of the report"
    )
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in tiny sizes")
    options = parser.parse_args(words)
    if options.call == "repair":
        options.parts = options.parts or find_unfinished(Path(options.output))
    known = [part.name for part in find_parts(options.call, Path())]
    if unknown := sorted(set(options.parts or ()) - set(known)):
        parser.error(f"there is no part {unknown[0]!r}; use {', '.join(known)}")
    return options


def find_parts(call: str, files: Path) -> list[Part]:
    """Returns the parts of a call; those of a repair are of the first call."""
    return CALLS["first" if call == "repair" else call](files)


def find_unfinished(folder: Path) -> list[str]:
    """Returns the names of the parts that failed in the first call, or were not reached."""
    path = folder / "first.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist: a repair follows benchmarks/gpu.sh first")
    parts = json.loads(path.read_text())["parts"]
    return [part["part"] for part in parts if part["outcome"] != "passed"]


def stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main(words: Sequence[str]) -> int:
    options = parse(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        (site / "shardzoo").symlink_to(ROOT)  # the checkout is the package
        call = Call(options, site)
        try:
            if reason := prepare(call, site):
                print(f"error: {reason}", file=sys.stderr)
                return NOTHING_RUNS
        except (ValueError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return NOTHING_RUNS
        chosen = [
            part
            for part in find_parts(call.name, call.files)
            if options.parts is None or part.name in options.parts
        ]
        try:
            for part in chosen:
                call.run(part)
        finally:
            for part in chosen[len(call.outcomes) :]:
                call.outcomes.append(Outcome(part.name, "not run: the call was ended", 0.0))
            print(f"report: {write(call.folder, call.name, call.facts, call.outcomes)}")
    return int(any(outcome.outcome != "passed" for outcome in call.outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
