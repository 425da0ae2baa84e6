"""examples/tour.ipynb runs from top to bottom, and shows what it computes."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import pytest
from commands import warm_programs
from documents import ROOT
from nbclient import NotebookClient

from shardzoo.trainer import notebook_launcher

NOTEBOOK = ROOT / "examples/tour.ipynb"
SECONDS = 180
# What differs between machines and runs: digests of trained weights, and lines with losses or texts of the model.
VARIES = re.compile(r"'[0-9a-f]{12}'|^.*(loss|__init__).*$", re.MULTILINE)


def shown(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell prints and returns, without what varies; pictures by their type."""
    found = []
    for output in cell.outputs:
        assert output.output_type != "error"
        data = output.get("data", {})
        found.append(
            "image/png" if "image/png" in data else output.get("text") or data["text/plain"]
        )
    return [VARIES.sub("", "".join(found))]


@pytest.mark.before_release
def test_the_tour(tmp_path, monkeypatch):
    """Ranks are copies of a process that has imported everything, like other programs in the tests."""
    monkeypatch.delenv(
        "PYTEST_CURRENT_TEST"
    )  # with it a kernel does not show what other processes print
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    python = str(warm_programs() / "python")
    fresh.cells.insert(0, nbformat.v4.new_code_cell(f"import sys; sys.executable = {python!r}"))
    started = time.monotonic()
    NotebookClient(
        fresh, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert time.monotonic() - started < SECONDS
    for old, new in zip(stored.cells, fresh.cells[1:], strict=True):
        if old.cell_type == "code":
            assert old.execution_count
            assert shown(old) == shown(new)
    assert any(
        cell.get("outputs") and "image/png" in cell.outputs[0].get("data", {})
        for cell in stored.cells
    )
    assert str(ROOT) not in NOTEBOOK.read_text()


@pytest.mark.before_release
def test_mistakes_in_a_notebook(capfd):
    def fail_on(
        rank: str,
    ) -> None:  # like a notebook's, these functions are in no module that a rank could import
        if os.environ["RANK"] == rank:
            raise KeyError("of this rank")
        time.sleep(60)

    def leave() -> None:
        raise SystemExit(0)

    with pytest.raises(ValueError, match="processes 0 must be at least 1"):
        notebook_launcher(leave, processes=0)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="exit code 1"):
        notebook_launcher(fail_on, "1")
    assert time.monotonic() - started < 50
    printed = capfd.readouterr().err
    assert "rank 1 failed first" in printed
    assert "KeyError: 'of this rank'" in printed
    with pytest.raises(RuntimeError, match="exit code 0 and without a result"):
        notebook_launcher(leave, processes=1)


@pytest.mark.before_release
def test_an_interrupted_cell_leaves_no_rank():
    def wait(path: str) -> None:
        Path(path, os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(60)

    with tempfile.TemporaryDirectory() as folder:
        timer = threading.Thread(target=interrupt_when, args=(Path(folder), 2))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            notebook_launcher(wait, folder)
        timer.join()
        for process in Path(folder).iterdir():
            assert not Path("/proc", process.read_text()).exists()


def interrupt_when(folder: Path, ranks: int) -> None:
    """Interrupts this process's main thread, as a kernel's stop button does, once so many ranks work."""
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
