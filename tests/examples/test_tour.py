"""examples/tour.ipynb runs from top to bottom, and shows what it computes."""

from __future__ import annotations

import re
import time

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
        found.append("image/png" if "image/png" in data else output.get("text") or data["text/plain"])
    return [VARIES.sub("", "".join(found))]


def test_the_tour(tmp_path, monkeypatch):
    """Ranks are copies of a process that has imported everything, like other programs in the tests."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not show what other processes print
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    python = str(warm_programs() / "python")
    fresh.cells.insert(0, nbformat.v4.new_code_cell(f"import sys; sys.executable = {python!r}"))
    started = time.monotonic()
    NotebookClient(fresh, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.monotonic() - started < SECONDS
    for old, new in zip(stored.cells, fresh.cells[1:], strict=True):
        if old.cell_type == "code":
            assert old.execution_count
            assert shown(old) == shown(new)
    assert any(cell.get("outputs") and "image/png" in cell.outputs[0].get("data", {}) for cell in stored.cells)
    assert str(ROOT) not in NOTEBOOK.read_text()


def fail_on(rank: str) -> None:
    import os
    import time

    if os.environ["RANK"] == rank:
        raise KeyError("of this rank")
    time.sleep(60)


def leave() -> None:
    raise SystemExit(0)


def test_mistakes_in_a_notebook(capfd):
    with pytest.raises(ValueError, match="processes 0 must be at least 1"):
        notebook_launcher(leave, processes=0)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="exit code 1"):
        notebook_launcher(fail_on, "1")
    assert time.monotonic() - started < 50
    assert "rank 1 failed first" in (printed := capfd.readouterr().err)
    assert "KeyError: 'of this rank'" in printed
    with pytest.raises(RuntimeError, match="exit code 0 and without a result"):
        notebook_launcher(leave, processes=1)
