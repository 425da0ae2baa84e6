"""`shardzoo` finds its commands and says what went wrong."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from commands import user_environment

from shardzoo.cli import main as cli
from shardzoo.cli.arguments import join_repeated_lists
from shardzoo.cli.console import run_and_report
from shardzoo.cli.continued_runs import naming_how_to_resume
from shardzoo.cli.generate import GenerateArguments, read_prompts
from shardzoo.cli.rank_errors import run_and_report_once
from shardzoo.trainer.launch.rank_info import RankInfo
from shardzoo.trainer.run_folder import RunFolder


def test_help_lists_every_command(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardzoo 0.")


def test_unknown_command_names_the_close_one(capsys):
    assert cli.main(["convrt"]) == 2
    assert "did you mean convert?" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_module(command, capsys):
    try:
        code = cli.run_command(command, ["--help"])
    except SystemExit as ended:  # Most commands end the process after their help.
        code = ended.code
    assert code == 0
    assert "usage:" in capsys.readouterr().out


class OfALibrary(Exception):
    """Libraries in Rust have exceptions of their own for errors of a disk."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("batch_size is 0"), "error: batch_size is 0"),
        (
            FileNotFoundError(2, "No such file or directory", b"run/x"),
            "error: cannot read or write run/x: No such file",
        ),
        (
            OfALibrary("I/O error: No space left on device (os error 28)"),
            "error: cannot write: No space left on device",
        ),
    ],
)
def test_errors_of_users_and_disks_are_one_line(capsys, error, said):
    def failing() -> int:
        raise error

    for run in (
        run_and_report,
        lambda work: run_and_report_once(work, RankInfo.from_environment()),
    ):
        assert run(failing) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(said)
        assert len(shown.splitlines()) == 1 or isinstance(
            error, ValueError
        )  # whose traceback shows this test


@pytest.mark.parametrize("command", ["pretrain", "finetune", "generate", "lm-eval"])
def test_a_launchers_wrong_variable_is_one_line(command, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "x")
    assert cli.main([command]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: the environment variable RANK='x' is not a number")
    assert len(shown.splitlines()) == 1


def test_other_errors_are_not_hidden():
    for run in (
        run_and_report,
        lambda work: run_and_report_once(work, RankInfo.from_environment()),
    ):
        with pytest.raises(ZeroDivisionError):
            run(lambda: 1 // 0)


@pytest.mark.before_release
@pytest.mark.parametrize("seconds", [0.3, 0])
def test_an_interrupt_during_a_destructor_is_not_lost(seconds):
    """Python swallows exceptions of destructors, such as those of the library that reads patterns of tokenizers.

    seconds: how long Python takes to report the exception, as on a loaded machine.
    """
    script = f"""
import os, signal, sys, threading, time
from shardzoo.cli import main, models

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def start(thread, now=threading.Thread.start):
    now(thread)
    time.sleep({seconds})

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(9))

def work(argv):
    Interrupted()
    time.sleep(20)
    return 0

models.main, threading.Thread.start = work, start
sys.exit(main.main(["models"]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=user_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_interrupted_run_says_once_how_it_goes_on(tmp_path, monkeypatch, capsys):
    def work(argv):
        with naming_how_to_resume(SimpleNamespace(run_folder=RunFolder(tmp_path))):
            raise KeyboardInterrupt

    monkeypatch.setattr("shardzoo.cli.models.main", work)
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["models"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    assert cli.main(["models"]) == 130
    wanted = f"interrupted; continue with --resume --output-dir {tmp_path}\n"
    assert capsys.readouterr().err == wanted
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["models"]) == 130
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_ends_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "shardzoo.cli.main", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=user_environment(),
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", cli.CLOSED_PIPE)


def test_what_an_encoding_lacks_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))

    def work() -> int:
        print("loading …")
        sys.stdout.flush()
        return 0

    for run in (
        run_and_report,
        lambda work: run_and_report_once(work, RankInfo.from_environment()),
    ):
        assert run(work) == 0
    assert raw.getvalue() == b"loading \\u2026\n" * 2


def test_a_list_that_is_named_twice_has_the_values_of_both():
    default = GenerateArguments()
    for given, joined in (
        (["--prompt", "a", "--tp", "2", "--prompt", "b", "c"], ["--prompt", "a", "b", "c", "--tp", "2"]),
        (["--prompt=a", "--prompt=b"], ["--prompt", "a", "b"]),
        (["--prompt=a", "--model", "m", "--model", "n"], ["--prompt=a", "--model", "m", "--model", "n"]),
    ):  # fmt: skip
        assert join_repeated_lists(given, default) == joined


def test_prompts_that_are_no_text_are_refused(tmp_path):
    for name, content, problem in (
        ("deep.jsonl", b"[" * 100_000, "nested too deeply"),
        ("deep.jsonl", b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        ("half.jsonl", b'{"prompt": "\\ud800"}', "lone surrogate"),
        ("bytes.txt", b"a\n\xff\n", "record 2"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=problem):
            list(read_prompts(GenerateArguments(file=tmp_path / name)))
    with pytest.raises(ValueError, match="UTF-8"):
        list(read_prompts(GenerateArguments(prompt=("\udcff",))))


def test_prompts_of_any_file(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name, content in (
        ("a.txt", mark + b"one\r\ntwo\r\n"),
        ("a.jsonl", mark + b'{"prompt": "one"}\n\n{"text": "two"}\n'),
        ("a.json", mark + b'[\n{"prompt": "one"},\n{"text": "two"}]'),
    ):
        (tmp_path / name).write_bytes(content)
        assert list(read_prompts(GenerateArguments(file=tmp_path / name))) == ["one", "two"]
