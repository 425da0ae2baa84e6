"""The folder of a run: one run at a time uses it, and a new run deletes nothing but what runs have written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from every_case import every_day
from training import run_training

from shardzoo.trainer import run_lock
from shardzoo.trainer.checkpointing import resume
from shardzoo.trainer.launch.heartbeat import process_state
from shardzoo.trainer.run_folder import RunFolder
from shardzoo.trainer.run_lock import LOCK, check_not_lost, return_folder, take_folder

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
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), *host], stdout=subprocess.PIPE, text=True
        )
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
            with pytest.raises(
                ValueError, match=f"in use by process {process.pid} on {socket.gethostname()}; wait"
            ):
                take_folder(path)


def test_a_run_that_has_saved_nothing_yet_is_not_called_broken(tmp_path, other_process):
    folder = RunFolder(tmp_path / "run")
    process = other_process(folder.path)
    with pytest.raises(
        ValueError, match=rf"goes on in process {process.pid} on .* no checkpoint yet"
    ):
        folder.first_step(resume=True, overwrite=False)
    folder.arguments_file.touch()
    with pytest.raises(ValueError, match=rf"a run that goes on in process {process.pid} on "):
        folder.first_step(resume=False, overwrite=False)
    process.kill()
    process.wait()
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        folder.first_step(resume=True, overwrite=False)
    with pytest.raises(ValueError, match="holds another run"):
        folder.first_step(resume=False, overwrite=False)


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
    while process_state(process.pid) != "Z":
        time.sleep(0.01)
    said: list[str] = []
    take_folder(tmp_path / "run", said.append)
    assert process.returncode is None
    assert len(said) == 1
    return_folder(tmp_path / "run")


def test_a_process_may_take_a_folder_again_and_others_once_it_has_returned_it(
    tmp_path, other_process
):
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


@pytest.mark.before_release
def test_a_process_of_another_host_counts_as_dead_after_a_while_without_a_sign(
    tmp_path, other_process, monkeypatch
):
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 1.5)
    folder, said = tmp_path / "run", []
    process = other_process(folder, "elsewhere", "1.5")
    os.utime(
        folder / LOCK, (0, 0)
    )  # as of a clock that is years behind; only changes of the time count
    threading.Timer(3.0, process.kill).start()
    before = time.monotonic()
    take_folder(folder, said.append)
    assert time.monotonic() - before > 4  # three seconds with signs of life, and then 1.5 without
    assert said == [
        f"{folder}: waiting to see whether process {process.pid} on elsewhere still runs …"
    ]
    return_folder(folder)


@pytest.mark.parametrize("host", every_day(["elsewhere"], more=[socket.gethostname()]))
def test_a_disk_that_cannot_exchange_files(tmp_path, other_process, monkeypatch, host):
    """As NFS: there the library alone never replaces the lock of a process that was killed."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("filelock")]
    exchanging = [module for module in loaded if hasattr(module, "exchange_names")]
    if not exchanging:
        pytest.skip("filelock 4.1 and earlier exchange no files")
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 1.0)
    monkeypatch.setattr(run_lock, "SECONDS_TO_DECIDE", 2.0)
    for module in exchanging:
        monkeypatch.setattr(module, "exchange_names", lambda source, target: False)
    folder, said = tmp_path / "run", []
    process = other_process(folder, host, "1.0")
    owner = f"process {process.pid} on {host}"
    with pytest.raises(ValueError, match=f"in use by {owner}; wait"):
        take_folder(folder, said.append)
    process.kill()
    process.wait()
    take_folder(folder, said.append)
    assert said == [f"{folder}: waiting to see whether {owner} still runs …"] * (
        1 + (host == "elsewhere")
    )
    check_not_lost(folder)
    return_folder(folder)
    assert not folder.exists()


IN_A_CONTAINER = """
import subprocess, sys
from shardzoo.trainer import run_lock
hold = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdout=subprocess.PIPE)
hold.stdout.readline()
try:
    run_lock.take_folder(run_lock.Path(sys.argv[1]))
except ValueError as error:
    print(hold.pid, error)
hold.kill()
"""


def test_a_folder_in_use_is_refused_at_once_in_a_container(tmp_path):
    """Where processes have numbers of their own, the lock names the host and these numbers."""
    contain = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*contain, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no namespaces")
    folder = tmp_path / "run"
    done = subprocess.run(
        [*contain, sys.executable, "-c", IN_A_CONTAINER, str(folder), HOLD],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    number, said = done.stdout.split(maxsplit=1)
    assert said == (
        f"{folder} is in use by process {number} on {socket.gethostname()}; wait for it or end it, or use another "
        "folder\n"
    )


BAD_LOCKS = {
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("a note"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4096),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "link to a file": lambda path: path.symlink_to(__file__),
    "loop": lambda path: path.symlink_to(path),
    "pipe": os.mkfifo,
    "other lease": lambda path: path.write_text(MARKER.format(host="elsewhere", duration=5.0)),
    "terminal": lambda path: path.write_text(MARKER.format(host="\x1b[2Jx", duration=60.0)),
}
MARKER = "filelock/2\npid=7\nhost={host}\nmode=lease\ntoken=00\nduration={duration}\n"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", BAD_LOCKS)
def test_a_lock_that_is_no_lock(tmp_path, monkeypatch, kind):
    """The folder is refused in one line that a terminal can show, or taken; nothing outside of it changes."""
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 1.0)
    monkeypatch.setattr(run_lock, "SECONDS_TO_DECIDE", 2.0)
    (tmp_path / "run").mkdir()
    BAD_LOCKS[kind](tmp_path / "run" / LOCK)
    before, content = sorted(tmp_path.rglob("*")), Path(__file__).read_bytes()
    problem = ""
    try:
        take_folder(tmp_path / "run", lambda text: None)
    except ValueError as error:
        problem = str(error)
    else:
        return_folder(tmp_path / "run")
    assert not problem or str(tmp_path / "run") in problem
    assert not set("\n\x1b") & set(problem)
    assert not problem or sorted(tmp_path.rglob("*")) == before
    assert Path(__file__).read_bytes() == content
    assert not (tmp_path / "run" / "elsewhere").exists()


def test_a_run_that_has_lost_its_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "SECONDS_WITHOUT_REFRESH", 0.3)
    folder = tmp_path / "run"
    take_folder(folder)
    check_not_lost(folder)
    (folder / LOCK).unlink()
    time.sleep(2.0)
    with pytest.raises(ValueError, match=r"is no longer this run's \(marker-missing\)"):
        check_not_lost(folder)
    return_folder(folder)


def test_a_second_run_that_resumes_leaves_the_saves_of_the_first_alone(tmp_path, other_process):
    folder = tmp_path / "run"
    run_training(None, folder, train_steps=1)
    partial = folder / "checkpoints" / ".step-000002.partial"
    partial.mkdir()
    (partial / "rank_00.safetensors").touch()
    process = other_process(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"in use by process {process.pid}"):
        run_training(None, folder, train_steps=3, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_resumes_from_what_another_has_saved_before_it_ended(tmp_path, monkeypatch):
    """It may end between the start of the second run and the moment when that gets the folder."""
    folder, take = tmp_path / "run", resume.take_folder
    run_training(None, folder, train_steps=1)
    shutil.copytree(folder, tmp_path / "other")
    run_training(None, tmp_path / "other", train_steps=3, resume=True, save_total_limit=1)

    def after_the_other(path, notify):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "other", folder)
        take(path, notify)

    monkeypatch.setattr(resume, "take_folder", after_the_other)
    steps, _ = run_training(None, folder, train_steps=4, resume=True)
    assert [step["step"] for step in steps] == [4]


def test_a_link_to_a_folder_is_the_folder(tmp_path):
    link, real = tmp_path / "link", tmp_path / "real"
    real.mkdir()
    link.symlink_to(real)
    for number in range(2):
        take_folder(link)
        run = RunFolder(link)
        assert run.first_step(resume=False, overwrite=bool(number)) == 0
        with run.new_data() as data:
            data.mkdir()
            run.begin({"seed": number}, data)
        return_folder(link)
    assert link.is_symlink()
    assert sorted(os.listdir(real)) == ["arguments.yaml", "data"]
    assert (real / "arguments.yaml").read_text() == "seed: 1\n"


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


def test_a_link_to_nothing_is_removed_before_a_run_writes_through_it(tmp_path):
    run = run_of(tmp_path / "run")
    for name in (
        "metrics.jsonl",
        "report.html",
        "checkpoints/.step-000003.partial",
        "checkpoints/.best.partial",
    ):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(tmp_path / "outside")
    run.name_best(run.checkpoint(10))
    run.delete_unfinished()
    assert run.best_checkpoint() == run.checkpoint(10)
    run.clear()
    assert os.listdir(run.path) == []
    assert not (tmp_path / "outside").exists()


def test_checkpoints_behind_a_link(tmp_path):
    """On a larger disk, for example."""
    run, large = run_of(tmp_path / "run"), tmp_path / "large"
    run.checkpoints.rename(large)
    run.checkpoints.symlink_to(large)
    run.clear()
    assert os.listdir(large) == []
    assert run.checkpoints.is_symlink()


def test_a_killed_replacement_of_a_run_can_be_repeated(tmp_path, monkeypatch):
    """As long as anything of a run is left, its folder is known as a run's."""
    run = run_of(tmp_path / "run")

    class Killed(BaseException):
        pass

    for most in range(30):
        left, unlink, rmtree = iter(range(most)), Path.unlink, shutil.rmtree

        def one(delete, left=left):
            def counted(*arguments, **keywords):
                if next(left, None) is None:
                    raise Killed
                return delete(*arguments, **keywords)

            return counted

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Path, "unlink", one(unlink))
            patch.setattr(shutil, "rmtree", one(rmtree))
            run.clear()
        if not list(run.path.iterdir()):
            return
        assert run.first_step(resume=False, overwrite=True) == 0
    pytest.fail("never complete")


def test_a_full_disk_leaves_the_arguments_of_before(tmp_path, monkeypatch):
    run = run_of(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: run.record_arguments({"seed": 2}), lambda: run.drop_metrics_after(3)):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert run.arguments_file.read_text() == "arguments.yaml"
    assert run.metrics_file.read_text() == "metrics.jsonl"
    assert not list(run.path.glob(".*"))


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_damaged_lines_of_metrics_are_skipped(tmp_path):
    run = run_of(tmp_path / "run")
    good = '{"step": 1, "train/loss": 2.5}\n'
    run.metrics_file.write_bytes(
        good.encode()
        + b'{"stfp": 2}\n[3]\n7\n\xff{"step": 4}\n{"step": "5"}\n'
        + b"[" * 100_000
        + b"\n{"
    )
    run.drop_metrics_after(9)
    assert run.metrics_file.read_text() == good


def test_a_folder_that_a_killed_preparation_left_is_free(tmp_path):
    run = RunFolder(tmp_path / "run")
    (run.path / ".data.partial").mkdir(parents=True)
    (run.path / LOCK).touch()
    assert run.first_step(resume=False, overwrite=False) == 0


def test_a_run_keeps_the_commands_that_have_trained_it(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.commands() == []
    for step, command in ((0, "first"), (4, "second"), (8, "lost"), (6, "third")):
        folder.record_command(step, command)
    kept = [(record["step"], record["command"]) for record in folder.commands()]
    assert kept == [(0, "first"), (4, "second"), (6, "third")]
    folder.commands_file.write_text('{"step": 0}\n{"st')
    assert folder.commands() == []
    assert folder.commands_file in folder.own_files()
