"""Conversions over several processes: the same bytes, and what is left when a process dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import user_environment

from shardzoo.cli import console
from shardzoo.cli import convert as command
from shardzoo.convert.operations import Options, merge, split


@pytest.fixture(scope="module")
def model(zoo, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    return zoo.make(
        folder, "gpt2", heads=6, head_size=16, feed_forward=250, layers=6, vocabulary=1003
    )


@pytest.mark.before_release
def test_processes_write_what_threads_write(model, tmp_path, file_tree):
    for name, options in (("threads", Options(jobs=2)), ("processes", Options(workers=2))):
        split(model, tmp_path / name, 5, options)
    assert file_tree(tmp_path / "processes") == file_tree(tmp_path / "threads")
    merge(
        tmp_path / "processes",
        tmp_path / "wide",
        Options(workers=2, dtype="F64", largest_file=300_000),
    )
    merge(model, tmp_path / "wanted", Options(dtype="F64", largest_file=300_000))
    assert file_tree(tmp_path / "wide") == file_tree(tmp_path / "wanted")


def test_an_error_in_a_process_is_the_same_error(model, tmp_path, quick_processes):
    split(model, tmp_path / "two", 2)
    content = bytearray((tmp_path / "two" / "rank_01.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "two" / "rank_01.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"rank_01.safetensors differs from tensor"):
        merge(tmp_path / "two", tmp_path / "merged", Options(workers=2))
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_workers_that_die_leave_what_can_be_resumed(
    model, tmp_path, file_tree, quick_processes, monkeypatch, capsys
):
    others = {child.pid for child in multiprocessing.active_children()}  # of the test session

    def kill(done: int, total: int) -> None:
        if done > total // 2:
            # All of them: one that lives may finish the work before the pool learns of a death.
            for child in multiprocessing.active_children():
                if child.pid not in others:
                    child.kill()

    @contextmanager
    def progress(as_json: bool):
        yield kill

    monkeypatch.setattr(command, "show_transfer", progress)
    arguments = ["split", str(model), str(tmp_path / "three"), "--tp", "3", "--workers", "2"]
    assert command.main(arguments) == 2
    assert "a worker process died (out of memory?); continue with --resume" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "three").exists()
    outcome = split(model, tmp_path / "three", 3, Options(resume=True, workers=2))
    assert outcome.kept > 0
    split(model, tmp_path / "wanted", 3)
    assert file_tree(tmp_path / "three") == file_tree(tmp_path / "wanted")


def convert_and_die(model: Path, destination: Path, pids: Path) -> None:
    """Runs in a process of its own, which kills itself when half is done."""

    def die(done: int, total: int) -> None:
        if done > total // 2:
            pids.write_text(json.dumps([child.pid for child in multiprocessing.active_children()]))
            os.kill(os.getpid(), signal.SIGKILL)

    split(model, destination, 3, Options(workers=2), die)


def test_the_processes_end_with_a_killed_conversion(model, tmp_path, file_tree, fork_server):
    process = fork_server.Process(
        target=convert_and_die, args=(model, tmp_path / "three", tmp_path / "pids")
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.02)
    split(model, tmp_path / "three", 3, Options(resume=True))
    split(model, tmp_path / "wanted", 3)
    assert file_tree(tmp_path / "three") == file_tree(tmp_path / "wanted")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be from 1 to 64, not 0"),
        ({"workers": 65}, "workers must be from 1 to 64, not 65"),
        ({"jobs": 0}, "jobs must be from 1 to 64, not 0"),
        ({"workers": 2, "jobs": 2}, "use one of them"),
    ],
)
def test_wrong_numbers(options, message, model, tmp_path):
    with pytest.raises(ValueError, match=message):
        split(model, tmp_path / "two", 2, Options(**options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_has_speed_and_remaining_time(as_json, monkeypatch, capsys):
    now = iter((0.0, 1.0, 1.5, 11.0, 11.5, 21.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    with console.show_transfer(as_json=as_json) as report:
        for done in (
            4_000,
            5_000,
            24_000,
            25_000,
            64_000,
        ):  # the first was done by an interrupted run
            report(done, 104_000)
    lines = capsys.readouterr().err.splitlines()
    if not as_json:
        assert lines == ["24 kB of 104 kB, 2 kB/s, 40 s left", "64 kB of 104 kB, 3 kB/s, 13 s left"]
        return
    values = [json.loads(line) for line in lines]
    assert values[-1] == {
        "bytes": 64_000,
        "total": 104_000,
        "bytes_per_second": 3000,
        "seconds_left": 13.3,
    }
    assert [line["bytes"] for line in values] == [5_000, 24_000, 64_000]


def test_the_processes_do_without_torch():
    code = "import sys; import shardzoo.convert.workers, shardzoo.convert.journal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=user_environment(), check=True)
