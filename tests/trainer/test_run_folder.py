"""The folder of a run: one run at a time uses it, and a new run deletes nothing but what runs have written."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardzoo.trainer import run_lock
from shardzoo.trainer.run_folder import RunFolder
from shardzoo.trainer.run_lock import LOCK, check_taken, return_folder, take_folder

HOLD = """
import socket, sys, time
from pathlib import Path
from shardzoo.trainer import run_lock
from shardzoo.trainer.run_lock import take_folder
if len(sys.argv) > 2:
    socket.gethostname = lambda: sys.argv[2]
    run_lock.SECONDS_WITHOUT_REFRESH = float(sys.argv[3])
take_folder(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_process():
    """Starts a process that takes a folder, and ends it."""
    started = []

    def start(folder: Path, *host: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *host], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_in_use_is_refused_also_while_its_process_stands_still(tmp_path, other_process):
    folder = tmp_path / "run"
    process = other_process(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    for stop in (None, signal.SIGSTOP):
        if stop:
            process.send_signal(stop)
        for path in (folder, link):
            with pytest.raises(ValueError, match=f"in use by process {process.pid} on {socket.gethostname()}; wait"):
                take_folder(path)


def test_the_folder_of_a_killed_process_is_free_at_once(tmp_path, other_process):
    process = other_process(tmp_path / "run")
    process.kill()
    process.wait()
    before = time.monotonic()
    take_folder(tmp_path / "run")
    assert time.monotonic() - before < 5
    return_folder(tmp_path / "run")


def test_the_folder_of_a_process_that_nobody_reaps_gets_free(tmp_path, other_process, monkeypatch):
    """Killed, it stays in the process table: the first process of a container may never ask for its end."""
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 2.0)
    process = other_process(tmp_path / "run", socket.gethostname(), "2")
    process.kill()
    said: list[str] = []
    take_folder(tmp_path / "run", said.append)
    assert process.returncode is None
    assert len(said) == 1
    return_folder(tmp_path / "run")


def test_a_process_may_take_a_folder_again_and_others_once_it_has_returned_it(tmp_path, other_process):
    folder = tmp_path / "run"
    take_folder(folder)
    take_folder(folder)
    return_folder(folder)
    (folder / "kept").touch()
    assert (folder / LOCK).exists()
    return_folder(folder)
    assert list(folder.iterdir()) == [folder / "kept"]
    other_process(folder)


def test_an_unused_folder_is_removed_again(tmp_path):
    take_folder(tmp_path / "a" / "b")
    return_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a" / "b").exists()


def test_a_process_of_another_host_counts_as_dead_after_a_while_without_a_sign(tmp_path, other_process, monkeypatch):
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 1.5)
    folder, said = tmp_path / "run", []
    process = other_process(folder, "elsewhere", "1.5")
    threading.Timer(3.0, process.kill).start()
    before = time.monotonic()
    take_folder(folder, said.append)
    assert time.monotonic() - before > 4  # three seconds with signs of life, and then 1.5 without
    assert said == [f"{folder}: waiting to see whether process {process.pid} on elsewhere still runs …"]
    return_folder(folder)


def test_a_run_that_has_lost_its_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 0.3)
    folder = tmp_path / "run"
    take_folder(folder)
    check_taken(folder)
    (folder / LOCK).unlink()
    time.sleep(2.0)
    with pytest.raises(ValueError, match=r"is no longer this run's \(marker-missing\)"):
        check_taken(folder)
    return_folder(folder)


def run_of(folder: Path) -> RunFolder:
    """A run's folder in which a user keeps other files."""
    for name in ("arguments.yaml", "metrics.jsonl", "data/train.bin", "hf/config.json", "report.html",
                 "checkpoints/step-000010/model.safetensors", "checkpoints/.step-000020.partial/model.safetensors",
                 "checkpoints/step-000008.abandoned1/x", "checkpoints/best", "tensorboard/events"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return RunFolder(folder)


def test_a_new_run_deletes_only_what_runs_write(tmp_path):
    run = run_of(tmp_path / "run")
    thesis, notes = run.path / "thesis.tex", run.checkpoints / "notes.txt"
    for file in (thesis, notes):
        file.write_text("years of work")
    with run.new_data() as data:
        data.mkdir()
        (data / "train.bin").write_text("new")
        run.begin({"seed": 1}, data)
    left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())
    assert left == ["arguments.yaml", "checkpoints/notes.txt", "data/train.bin", "thesis.tex"]
    assert (run.data / "train.bin").read_text() == "new"
    assert run.arguments_file.read_text() == "seed: 1\n"


def test_links_in_a_run_are_removed_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    run = run_of(tmp_path / "run")
    (run.path / "trace.json").symlink_to(outside)
    run.clear()
    assert (outside / "precious").exists()
    assert not run.path.joinpath("trace.json").is_symlink()


def test_a_folder_that_a_killed_preparation_left_is_free(tmp_path):
    run = RunFolder(tmp_path / "run")
    (run.path / ".data.partial").mkdir(parents=True)
    (run.path / LOCK).touch()
    assert run.first_step(resume=False, overwrite=False) == 0
