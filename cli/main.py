"""Runs `shardzoo <command>`.

It imports only the module of that command, so that simple commands start fast.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

from .. import __version__
from ..files.verbosity import VARIABLE, take_verbosity
from .console import USAGE_ERROR, print_any_text, print_error

# As a shell reports a SIGINT and a SIGPIPE.
INTERRUPTED = 130
CLOSED_PIPE = 141

TOPICS = {
    "train": {
        "pretrain": "pretrain a model on text",
        "finetune": "fine-tune a model on pairs, labelled texts or plain text",
        "recipes": "list the recipes of published models, or print one",
        "board": "show runs on a local page while they go on",
        "checkpoint": "verify the checkpoints of a run",
    },
    "use models": {
        "generate": "continue, answer or fill in texts with a model",
        "lm-eval": "evaluate a model with lm-evaluation-harness",
        "convert": "split, merge, reshard and verify checkpoints",
        "models": "list families, presets and their sizes",
    },
    "prepare": {
        "data": "prepare, merge, split and inspect corpora; train tokenizers",
        "estimate": "estimate whether a training run fits a device's memory",
        "plan": "lay a training run out on a cluster, and predict its time",
    },
    "this machine": {
        "doctor": "show which kernels are built and used",
        "bench": "measure the fused kernels",
        "completion": "complete commands and options in bash or zsh",
    },
}
"""The commands and what they do, by topic."""
COMMANDS = [name for commands in TOPICS.values() for name in commands]


def run_command(name: str, argv: list[str]) -> int:
    """Imports the module of a command and runs it; returns its exit code."""
    match name:
        case "pretrain":
            from .pretrain import main
        case "finetune":
            from .finetune import main
        case "recipes":
            from .recipes import main
        case "board":
            from .board.command import main
        case "checkpoint":
            from .checkpoint import main
        case "generate":
            from .generate import main
        case "lm-eval":
            from .lm_eval.command import main
        case "convert":
            from .convert import main
        case "models":
            from .models import main
        case "data":
            from .data import main
        case "estimate":
            from .estimate import main
        case "plan":
            from .plan import main
        case "doctor":
            from .doctor import main
        case "bench":
            from .bench import main
        case "completion":
            from .completion import main
        case _:
            raise KeyError(name)
    return main(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 for an unknown command, 130 after Ctrl-C, or 141 if
    the program that reads its output has ended.
    """
    print_any_text()
    before = os.environ.get(VARIABLE, "")
    words = take_verbosity(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return dispatch(words)
        finally:
            # What is written only at the end of the process could not be caught here.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        return leave_closed_pipe()
    finally:
        os.environ[VARIABLE] = before  # of a caller in this process, such as a notebook


def leave_closed_pipe() -> int:
    """Ends output to a program that has stopped reading, such as `head`; returns the exit code."""
    # Python flushes standard output once more when the process ends.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


def dispatch(words: Sequence[str]) -> int:
    """Runs the command that the first word names; returns its exit code."""
    command, *rest = words or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"shardzoo {__version__}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(COMMANDS)}"
        print_error(ValueError(f"there is no command {command!r}; {hint}"))
        return USAGE_ERROR
    try:
        with _repeating_interrupts():
            return run_command(command, rest)
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # The other ranks of the job are interrupted too.
            advice = f"; {interrupt}" if interrupt.args else ""
            print(f"interrupted{advice}", file=sys.stderr)
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
    """Interrupts the main thread when it has left a function, in which the interrupt would be lost
    again.
    """
    main = threading.main_thread().ident or 0
    while code in (
        frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames().get(main))
    ):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def usage() -> str:
    """Returns the text that lists all commands."""
    width = max(map(len, COMMANDS))
    lines = ["usage: shardzoo COMMAND [options]"]
    for topic, commands in TOPICS.items():
        lines += ["", f"{topic}:"]
        lines += [f"  {name:<{width}}  {text}" for name, text in commands.items()]
    return "\n".join(
        [
            *lines,
            "",
            "every command takes:",
            "  --quiet      print results and errors alone",
            "  --verbose    print errors with the place in the code where they were found",
            "",
            "`shardzoo COMMAND --help` shows a command's options.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
