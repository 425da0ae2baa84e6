"""Runs `shardzoo <command>`. It imports only the module of that command, so that simple commands start fast."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from .. import __version__
from .console import USAGE_ERROR

INTERRUPTED = 130  # as a shell reports a SIGINT

# topic -> command -> (module with `main(argv) -> exit code`, help text)
TOPICS = {
    "train": {
        "pretrain": ("shardzoo.cli.pretrain", "pretrain a model on text"),
        "finetune": (
            "shardzoo.cli.finetune",
            "fine-tune a model on pairs, labelled texts or plain text",
        ),
        "board": ("shardzoo.cli.board.command", "show runs on a local page while they go on"),
        "checkpoint": ("shardzoo.cli.checkpoint", "verify the checkpoints of a run"),
    },
    "use models": {
        "generate": ("shardzoo.cli.generate", "continue, answer or fill in texts with a model"),
        "lm-eval": ("shardzoo.cli.lm_eval.command", "evaluate a model with lm-evaluation-harness"),
        "convert": ("shardzoo.cli.convert", "split, merge, reshard and verify checkpoints"),
        "models": ("shardzoo.cli.models", "list families, presets and their sizes"),
    },
    "prepare": {
        "data": (
            "shardzoo.cli.data",
            "prepare, merge, split and inspect corpora; train tokenizers",
        ),
        "estimate": (
            "shardzoo.cli.estimate",
            "estimate whether a training run fits a device's memory",
        ),
        "plan": ("shardzoo.cli.plan", "lay a training run out on a cluster, and predict its time"),
    },
    "this machine": {
        "doctor": ("shardzoo.cli.doctor", "show which kernels are built and used"),
        "bench": ("shardzoo.cli.bench", "measure the fused kernels"),
    },
}
COMMANDS = {name: entry for commands in TOPICS.values() for name, entry in commands.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 for an unknown command, or 130 after Ctrl-C."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"shardzoo {__version__}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(COMMANDS)}"
        print(f"error: there is no command {command!r}; {hint}", file=sys.stderr)
        return USAGE_ERROR
    try:
        with _repeating_interrupts():
            return importlib.import_module(COMMANDS[command][0]).main(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _repeating_interrupts() -> Generator[None]:
    """Repeats a Ctrl-C that comes during an object's destructor, which Python would only report."""
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Thread(target=_interrupt_after, args=(report.__code__,), daemon=True).start()
        else:
            before(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_after(code: CodeType) -> None:
    """Interrupts the main thread when it has left a function, in which the interrupt would be lost again."""
    main = threading.main_thread().ident or 0
    while code in (
        frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames().get(main))
    ):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: shardzoo COMMAND [options]"]
    for topic, commands in TOPICS.items():
        lines += [
            "",
            f"{topic}:",
            *(f"  {name:<{width}}  {text}" for name, (_, text) in commands.items()),
        ]
    return "\n".join([*lines, "", "`shardzoo COMMAND --help` shows a command's options."])


if __name__ == "__main__":
    sys.exit(main())
