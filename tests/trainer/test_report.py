"""`report.html`, `loss.png` and `metrics.jsonl` say the same; the report names what the run depended on."""

from __future__ import annotations

import html.parser
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardzoo.trainer.logging.provenance import command_line, git_commit, hardware, versions
from shardzoo.trainer.logging.report import plot_loss, smoothed, write_report
from shardzoo.trainer.logging.trackers import TensorBoard, TrackedRun
from shardzoo.trainer.run_folder import RunFolder

SPEED = {
    "train/seconds": 0.5,
    "train/tokens_per_second": 100.0,
    "train/mfu": 0.25,
    "train/memory_gb": 1.5,
}
RECORDS = [
    *(
        {"step": step, "train/loss": 9.0 - step / 400, "train/lr": 1e-3, **SPEED}
        for step in range(100, 1601, 100)
    ),
    *(
        {"step": step, "valid/loss": loss}
        for step, loss in ((500, 7.5), (1000, 6.125), (1500, 6.25))
    ),
    {"step": 1600, "final/loss": 6.3125, "final/accuracy": 0.5},
]


class Page(html.parser.HTMLParser):
    """Collects the headings, the rows of tables as {name: value}, the texts of <pre>, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings, self.rows, self.texts, self.tags, self.attributes = [], {}, [], [], []
        self._open, self._name = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [value or "" for name, value in attrs if name in ("src", "href")]
        self._open = tag

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open in ("h1", "h2"):
            self.headings.append(data)
        elif self._open == "th":
            self._name = data
        elif self._open == "td":
            self.rows[self._name] = data
        elif self._open == "pre":
            self.texts.append(data)


def lines_of(monkeypatch, draw) -> dict[str, list[tuple[float, float]]]:
    """The points of the labelled lines that a function draws, from the figure that it saves, and its annotations."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))[1]
    )
    draw()
    axes = saved[0].axes[0]
    lines = {
        str(line.get_label()): list(zip(*map(list, line.get_data()), strict=True))
        for line in axes.lines
    }
    return {**lines, "texts": [text.get_text() for text in axes.texts]}


def test_the_report_and_both_plots_end_with_the_last_logged_values(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    drawn = lines_of(monkeypatch, lambda: write_report(path, RECORDS, {"lr": 1e-3}, title="a run"))
    rows = Page(path.read_text()).rows
    assert rows["best held-out loss"] == "6.1250 at step 1,000"
    assert rows["training loss"] == (
        "5.0000, the mean of the last 100 steps (of the first 100: 8.7500)"
    )
    assert rows["last held-out evaluation"] == "loss 6.2500 at step 1,500"
    assert rows["final evaluation"] == "loss 6.3125, accuracy 0.5000 at step 1,600"
    assert drawn["held-out, at intervals"] == [(500, 7.5), (1000, 6.125), (1500, 6.25)]
    assert drawn["held-out, final evaluation of all samples"] == [(1600, 6.3125)]
    assert drawn["texts"] == ["6.3125"]

    def plot() -> None:
        plot_loss(
            RECORDS,
            tmp_path / "loss.png",
            tokens_per_step=2000,
            entropy=5.5,
            entropy_label="entropy of spans",
            title="$",
        )

    drawn = lines_of(monkeypatch, plot)
    assert drawn["held-out, at intervals"] == [(1.0, 7.5), (2.0, 6.125), (3.0, 6.25)]
    assert drawn["held-out, final evaluation of all samples"] == [(3.2, 6.3125)]
    assert [y for _, y in drawn["entropy of spans"]] == [5.5, 5.5]
    assert drawn["texts"] == ["6.3125"]


def test_a_running_mean_does_not_lag_behind_the_first_steps():
    """It goes over a share of the points, and near the beginning over the last quarter of those so far."""
    values = np.linspace(8, 4, 1000) ** 2
    for at, mean in enumerate(smoothed(values), 1):
        width = max(1, min(at // 4, 20))
        assert mean == pytest.approx(values[at - width : at].mean())


def test_the_report_averages_the_losses_that_were_logged_as_means(tmp_path):
    records = []
    for step in range(10, 410, 10):
        records.append({"step": step, "train/loss": 0.0, "train/mean_loss": step / 100, **SPEED})
    records[-1]["step"] = 395  # The last line of a run may be of fewer steps.
    write_report(tmp_path / "report.html", records, {}, title="a run")
    rows = Page((tmp_path / "report.html").read_text()).rows
    assert rows["training loss"] == (
        "3.9333, the mean of the last 15 steps (of the first 20: 0.1500)"
    )


def test_a_run_without_a_final_evaluation_shows_the_last_interval(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    drawn = lines_of(monkeypatch, lambda: write_report(path, RECORDS[:-1], {}, title="a run"))
    rows = Page(path.read_text()).rows
    assert "final evaluation" not in rows
    assert "held-out, final evaluation of all samples" not in drawn
    assert drawn["texts"] == ["6.2500"]


def test_sections_are_escaped_and_nothing_is_loaded_from_elsewhere(tmp_path):
    hostile = "</pre></td><script src=http://x.invalid/a.js></script>\udcff&amp;"
    sections = {
        f"Sample {hostile}": f"a\n{hostile}",
        "Export": {f"difference {hostile}": hostile, "loss": 1.5},
    }
    path = tmp_path / "report.html"
    write_report(path, RECORDS, {"data": hostile}, title=hostile, sections=sections)
    shown = hostile.replace("\udcff", "\\udcff")
    page = Page(path.read_text())
    assert "script" not in page.tags
    assert all(value.startswith("#") for value in page.attributes)
    assert page.headings == [shown, "Results", f"Sample {shown}", "Export", "Arguments"]
    assert page.texts == [f"a\n{shown}"]
    assert page.rows["data"] == page.rows[f"difference {shown}"] == shown
    assert page.rows["loss"] == "1.5"
    assert list(tmp_path.iterdir()) == [path]


def test_a_final_evaluation_is_removed_when_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    folder.drop_after(1600, evaluated=True)
    assert folder.metrics() == RECORDS[:-1]


def test_versions_and_hardware_are_those_of_the_machine():
    import deepspeed
    import torch
    import transformers

    import shardzoo

    found = versions()
    assert found.pop("python") == ".".join(map(str, sys.version_info[:3]))
    assert found == {
        "torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__,
        "shardzoo": shardzoo.__version__,
    }  # fmt: skip
    assert {"CPU", "GPUs"} <= hardware().keys()


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_commit_is_of_the_script_s_repository_then_of_the_working_directory(
    tmp_path, monkeypatch
):
    for name in ("script", "working"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / "train.py").write_text(name)
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-q", "-m", "a")
        git(tmp_path / name, "tag", "v1")
    (tmp_path / "neither").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "script" / "train.py"), "--local_rank=1", "--lr", "a b"]
    )
    assert git_commit() == git(tmp_path / "script", "rev-parse", "HEAD")
    assert command_line() == f"{tmp_path}/script/train.py --lr 'a b'"
    (tmp_path / "script" / "train.py").write_text("changed")
    assert git_commit() == git(tmp_path / "script", "rev-parse", "HEAD") + "-dirty"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "neither" / "train.py")])
    assert git_commit() == git(tmp_path / "working", "rev-parse", "HEAD")
    monkeypatch.chdir(tmp_path / "neither")
    assert git_commit() is None


@pytest.mark.parametrize("given", [{}, {"Data": {"tokens": 12}}], ids=["no sections", "a section"])
def test_every_run_s_report_names_versions_hardware_and_command(tmp_path, monkeypatch, given):
    from shardzoo.trainer import Trainer

    trainer = Trainer(env_type="pytorch", train_steps=1, save_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    trainer.run_folder.metrics_file.write_text(
        "".join(json.dumps(record) + "\n" for record in RECORDS)
    )
    trainer.write_report(given)
    page = Page(trainer.run_folder.report.read_text())
    assert page.headings == [
        "run",
        "Results",
        *given,
        "Versions",
        "Hardware",
        "Command",
        "Arguments",
    ]
    assert page.rows["processes"] == "1: 1 tensor-parallel x 1 data-parallel"
    assert page.texts == [command_line()]


def test_a_failed_writer_of_tensorboard_reports_nothing_by_itself(tmp_path, monkeypatch, capsys):
    """Its thread tells the error first and ends later, perhaps when the run has closed its sinks."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    def fail(thread):
        thread.exception = OSError("no such disk")
        time.sleep(0.3)
        raise thread.exception

    monkeypatch.setattr(_AsyncWriterThread, "run", fail)
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    sink = TensorBoard(TrackedRun("run", {}, tmp_path, 0), tmp_path)

    def log():
        for step in range(100):
            sink.log(step, {"loss": 1.0})
            time.sleep(0.01)

    with pytest.raises(OSError, match="no such disk"):
        log()
    sink.close()
    time.sleep(0.5)
    assert not reported
    assert threading.excepthook == reported.append
