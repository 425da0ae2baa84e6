"""`shardzoo board`: a local page with the curves, checkpoints and shards of several runs, while
they go on.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

import numpy as np
from tyro.conf import Positional

from ...checkpoint.manifest import Manifest, TensorRecord
from ...files.object_store import find_url
from ...files.working_copies import name_urls
from ...mpu.shard import Shard
from ...trainer.run_folder import RunFolder, parse_metrics_line
from ...trainer.run_lock import LOCK
from ..console import explain_error, run_and_report
from ..help import HelpPage, show_help
from ..parsing import list_fields, parse_words
from .stored_run import StoredRun

PAGE = Path(__file__).with_name("page")
# All that is served as a file. Nothing in a request is ever part of a path.
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
READING_SECONDS = 1.0  # for which an answer waits for files that are not read to their end
MOST_POINTS = 4096  # pixels of a wide screen
SHOWN_RANKS = 16
CHUNK = 1 << 20  # bytes that are read at once; a longer line is no record of a run
# Bytes before the place that was read to, which tell whether the file is still the same.
REMEMBERED = 256
MOST_CURVES = 2000  # of a run; further names are not shown
# Values of single steps, which vary so much that the page draws their running means over them.
VARYING = (
    "train/loss",
    "train/grad_norm",
    "train/tokens_per_second",
    "train/samples_per_second",
    "train/seconds",
    "train/mfu",
)
LOSS = "train/loss"
MEAN_LOSS = "train/mean_loss"  # of the steps since the line before; drawn as the mean of LOSS
MEAN_SHARE = 1 / 50  # of the shown steps, over which a running mean goes
LAST_SHARE = 1 / 20  # of a run's lines, whose mean is the loss in the table
LONGEST_PROBLEM = 300  # characters
MOST_STEPS = 1 << 53  # up to which a browser's numbers are exact
# What a folder that no run has written may cause. The page then shows it beside the run's name.
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


@dataclass(frozen=True, kw_only=True)
class Board:
    """Show runs on a local page, which follows them while they go on. Ctrl-C ends it."""

    runs: Positional[tuple[Path, ...]]
    """The folders of the runs, or their URLs in object stores."""
    port: int = 6007
    """The port of the page; 0 for any free one."""
    host: str = "127.0.0.1"
    """The address to listen on.

    With any other than this machine's own, everybody in the network can read the page.
    """


HELP = HelpPage("shardzoo board", Board, required=("runs",))


def main(argv: Sequence[str] | None = None) -> int:
    """Serves the page until it is interrupted. Returns 2 after a user's error."""
    argv = sys.argv[1:] if argv is None else argv
    show_help(HELP, argv)
    command = parse_words(Board, argv, HELP.program)
    return run_and_report(lambda: serve(command), options=list_fields(Board))


def serve(command: Board) -> int:
    """Serves the page. Raises ValueError if a folder holds no run, or the port cannot be used."""
    with make_server(command) as server:
        host = f"[{command.host}]" if ":" in command.host else command.host
        print(f"http://{host}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def make_server(command: Board) -> Server:
    """Returns a server that listens already. Raises ValueError like `serve`."""
    if not command.runs:
        raise ValueError("name the folder of at least one run, such as runs/quickstart")
    runs = [Run(path) for path in dict.fromkeys(command.runs)]
    if not 0 <= command.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, not {command.port}")
    try:
        return Server(command.host, command.port, Runs(runs))
    except OSError as error:
        where = f"{command.host}, port {command.port}"
        raise ValueError(
            f"cannot listen on {where}: {error.strerror}; choose another --port (0 for any free one) or --host"
        ) from None


class Curve:
    """The values of one name, and the steps at which they were logged."""

    def __init__(self) -> None:
        self.steps = array("d")
        self.values = array("d")


class Metrics:
    """The curves of a run, read from its file as it grows.

    Attributes:
        curves: Name, such as "train/loss" -> curve, in the order in which they first occur.
        changes: Grows with each change of `curves`.
        has_all: Whether all names have curves; there are at most `MOST_CURVES`.
    """

    def __init__(self, path: Path) -> None:
        self.curves: dict[str, Curve] = {}
        self.changes = 0
        self.has_all = True
        self._path = path
        self._offset = 0
        self._before = b""

    def read(self, deadline: float) -> bool:
        """Reads the lines that were added, until `deadline` of `time.monotonic`. Returns whether
        more are left.

        A last line without its end waits for the rest. A damaged line is skipped. A run that was
        resumed or overwritten has another file, which is read from its beginning.
        """
        if not self._path.is_file():
            self._begin()
            return False
        with self._path.open("rb") as file:
            self._follow(file)
            while time.monotonic() < deadline:
                chunk = file.read(CHUNK)
                end = chunk.rfind(b"\n") + 1 or (len(chunk) if len(chunk) == CHUNK else 0)
                if not end:
                    return False
                for line in chunk[:end].splitlines():
                    self._add(line)
                self._offset += end
                self._before = (self._before + chunk[:end])[-REMEMBERED:]
                self.changes += 1
                file.seek(self._offset)
        return True

    def _begin(self) -> None:
        if self._offset:
            self.changes += 1
        self.curves = {}
        self.has_all = True
        self._offset = 0
        self._before = b""

    def _follow(self, file: BinaryIO) -> None:
        """Goes to the place that was read to, or to the beginning of another file."""
        file.seek(self._offset - len(self._before))
        # The number of a file would not tell: a new one may have that of a deleted one.
        if file.read(len(self._before)) != self._before:
            self._begin()
            file.seek(0)

    def _add(self, line: bytes) -> None:
        record = parse_metrics_line(line) or {}
        try:
            numbers = {
                name: float(value) for name, value in record.items() if type(value) in (int, float)
            }
        except OverflowError:
            return
        if not numbers:
            return
        step = numbers.pop("step")
        if not abs(step) < MOST_STEPS:
            return
        for name, value in numbers.items():
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) == MOST_CURVES:
                    self.has_all = False
                    continue
                curve = self.curves[name] = Curve()
            curve.steps.append(step)
            curve.values.append(value)


def on_one_axis(
    curves: Sequence[Curve | None], width: int, first: float = -math.inf, last: float = math.inf
) -> tuple[list[float], list[list[Any]]]:
    """Returns steps from `first` to `last`, and the values of each curve at them, None where it has
    none.

    If there are more than `2 * width` steps, these are `width` intervals of equal lengths: two
    points for each, with the smallest and the largest value in it, so that no peak is lost.
    """
    parts = [_between(curve or Curve(), first, last) for curve in curves]
    longest = max((len(steps) for steps, _ in parts), default=0)
    if longest <= 2 * width:
        axis = np.unique(np.concatenate([np.empty(0), *(steps for steps, _ in parts)]))
        if len(axis) <= 2 * width:
            return axis.tolist(), [_exact(axis, *part) for part in parts]
    ends = [end for steps, _ in parts if len(steps) for end in (steps[0], steps[-1])]
    edges = np.linspace(min(ends), max(ends), width + 1)
    axis = np.stack([edges[:-1], (edges[:-1] + edges[1:]) / 2], 1).ravel()
    return axis.tolist(), [_extremes(edges[:-1], *part) for part in parts]


def running_means(
    axis: Sequence[float], curve: Curve | None, first: float = -math.inf, last: float = math.inf
) -> list[Any]:
    """Returns the means of a curve over the steps that end at each step of `axis`.

    They go over a share of the shown steps. Near the first shown one they go over the last quarter
    of the steps since, because a mean over all of them would lie far above a loss that falls. None
    where the curve has not begun, or has ended.
    """
    steps, values = _between(curve or Curve(), first, last)
    kept = np.isfinite(values)
    if not kept.any():
        return [None] * len(axis)
    at = np.array(axis)
    has_ended = at > steps[-1]
    steps = steps[kept]
    values = values[kept]
    ends = np.searchsorted(steps, at, side="right")
    window = np.minimum((at[-1] - at[0]) * MEAN_SHARE, (at - at[0]) / 4)
    starts = np.searchsorted(steps, at - window, side="right")
    starts = np.minimum(starts, np.maximum(ends - 1, 0))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[ends] - sums[starts]) / np.maximum(ends - starts, 1)
    means[(ends == 0) | has_ended] = np.nan
    return _for_json(means)


def _between(curve: Curve, first: float, last: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns copies, because an array whose memory is lent cannot grow."""
    steps = np.array(curve.steps)
    values = np.array(curve.values)
    if (steps[1:] < steps[:-1]).any():
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        values = values[order]
    kept = slice(np.searchsorted(steps, first), np.searchsorted(steps, last, side="right"))
    return steps[kept], values[kept]


def _exact(axis: np.ndarray, steps: np.ndarray, values: np.ndarray) -> list[Any]:
    row = np.full(len(axis), np.nan)
    row[np.searchsorted(axis, steps)] = values
    return _for_json(row)


def _extremes(starts: np.ndarray, steps: np.ndarray, values: np.ndarray) -> list[Any]:
    rows = np.full((len(starts), 2), np.nan)
    places = np.searchsorted(steps, starts)
    filled = places < np.append(places[1:], len(steps))
    if filled.any():
        rows[filled, 0] = np.fmin.reduceat(values, places[filled])  # fmin and fmax leave NaN out
        rows[filled, 1] = np.fmax.reduceat(values, places[filled])
    return _for_json(rows.ravel())


def _for_json(row: np.ndarray) -> list[Any]:
    """JSON has no NaN and no infinity."""
    return np.where(np.isfinite(row), row, np.array(None)).tolist()


class Run:
    """A run that the page shows. Raises ValueError if the folder holds none.

    Attributes:
        problem: Why the run's files could not be read the last time; empty if they could.
    """

    def __init__(self, path: Path) -> None:
        url = find_url(path)
        self.name = url or str(path)
        self.problem = ""
        self._stored = None
        if url is not None:
            self._stored = StoredRun(url)
            path = self._stored.path
            self._stored.follow()
        self.folder = RunFolder(path)
        self.metrics = Metrics(self.folder.metrics_file)
        if url is not None:
            return
        if not path.is_dir():
            raise ValueError(
                f"{path} is no folder; name the folder of a run, such as runs/quickstart"
            )
        if not any(
            file.exists()
            for file in (self.folder.arguments_file, self.folder.metrics_file, path / LOCK)
        ):
            raise ValueError(
                f"{path} holds no run (no arguments.yaml, no metrics.jsonl); name the folder of a run"
            )

    def read(self, deadline: float) -> bool:
        """Reads what was added to the metrics; returns whether more are left.

        A problem is the run's own: it is noted, and other runs are shown.
        """
        self.problem = self._stored.problem if self._stored is not None else ""
        try:
            is_more = self.metrics.read(deadline)
        except DAMAGE as error:
            self.problem = name_urls(explain_error(error))
            return False
        if not self.metrics.has_all:
            self.problem = f"only the first {MOST_CURVES:,} names of metrics.jsonl are shown"
        return is_more

    def summary(self) -> dict[str, Any]:
        """Returns what the page's table shows."""
        checkpoints: list[int] = []
        best = None
        try:
            checkpoints = self.folder.steps()
            best = self.folder.best_checkpoint()
        except DAMAGE as error:
            self.problem = name_urls(explain_error(error))
        last = {name: curve.values[-1] for name, curve in self.metrics.curves.items()}
        losses = self.metrics.curves.get(MEAN_LOSS) or self.metrics.curves.get(LOSS)
        if losses is not None:
            window = max(1, round(len(losses.values) * LAST_SHARE))
            last[MEAN_LOSS] = math.fsum(losses.values[-window:]) / window
        return {
            "name": self.name,
            "step": max((curve.steps[-1] for curve in self.metrics.curves.values()), default=None),
            "last": {
                name: value if math.isfinite(value) else str(value) for name, value in last.items()
            },
            "checkpoints": checkpoints,
            "best": best.name if best else None,
            "problem": self.problem[:LONGEST_PROBLEM],
        }

    def layout(self) -> dict[str, Any]:
        """Returns how the last checkpoint splits each parameter, or an error's text."""
        try:
            step = self.folder.latest_step()
            if step is None:
                return {"error": "no checkpoint yet"}
            manifest = Manifest.read(self.folder.checkpoint(step))
            size = manifest.tensor_parallel_size
            tensors = [_split(name, record, size) for name, record in manifest.tensors.items()]
            found = {"step": step, "ranks": size, "tensors": tensors}
            json.dumps(found, allow_nan=False)
        except DAMAGE as error:
            return {"error": name_urls(explain_error(error)) or type(error).__name__}
        return found


def _split(name: str, record: TensorRecord, size: int) -> dict[str, Any]:
    """Returns the row of a parameter: one shape for each of the first ranks, or none if all hold it
    whole.
    """
    parts = []
    if record.shard is not None:
        shard = Shard.from_record(record.shard)
        parts = [shard.local_shape(rank, size) for rank in range(min(size, SHOWN_RANKS))]
    split = None if record.shard is None else record.shard["dim"]
    return {
        "name": name,
        "dtype": record.dtype,
        "shape": record.shape,
        "split": split,
        "parts": parts,
    }


class Runs:
    """All runs of the page. One request at a time reads their files."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self._lock = threading.Lock()
        self._seen: object = None
        self._revision = ""

    def data(self, query: dict[str, str]) -> dict[str, Any]:
        """Returns the table and the charts, or only the revision if it is the one that the page
        has.

        Raises ValueError if the query is malformed.
        """
        width = min(max(int(query.get("width", "800")), 1), MOST_POINTS)
        first = float(query.get("first", "-inf"))
        last = float(query.get("last", "inf"))
        with self._lock:
            # Each run has a share of the time, so that one with endless files leaves the others some.
            share = READING_SECONDS / len(self.runs)
            is_more = False
            for run in self.runs:
                if run.read(time.monotonic() + share):
                    is_more = True
            summaries = [run.summary() for run in self.runs]
            changes = [run.metrics.changes for run in self.runs]
            shown = [(s["checkpoints"], s["best"], s["problem"]) for s in summaries]
            if (changes, shown) != self._seen:
                self._seen = (changes, shown)
                self._revision = str(time.time_ns())  # which no earlier server has given
            if query.get("seen") == self._revision:
                return {"revision": self._revision, "more": is_more}
            names = dict.fromkeys(name for run in self.runs for name in run.metrics.curves)
            charts = [
                self._chart(name, width, first, last)
                for name in names
                if not name.startswith("final/") and name != MEAN_LOSS
            ]
        return {"revision": self._revision, "more": is_more, "runs": summaries, "charts": charts}

    def _chart(self, name: str, width: int, first: float, last: float) -> dict[str, Any]:
        steps, values = on_one_axis(
            [run.metrics.curves.get(name) for run in self.runs], width, first, last
        )
        chart = {"name": name, "steps": steps, "values": values}
        if name in VARYING:
            chart["means"] = []
            for run in self.runs:
                curve = run.metrics.curves.get(name)
                if name == LOSS:
                    curve = run.metrics.curves.get(MEAN_LOSS) or curve
                chart["means"].append(running_means(steps, curve, first, last))
        return chart


class Server(ThreadingHTTPServer):
    """Answers a browser: the page's files, `/data` and `/layout`."""

    daemon_threads = True

    def __init__(self, host: str, port: int, runs: Runs) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.runs = runs
        # A foreign page whose name leads to this machine (DNS rebinding) sends that name.
        is_open = host in ("", "0.0.0.0", "::")
        self.names = None if is_open else {"localhost", "127.0.0.1", host.lower()}


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        try:
            status, kind, body = self._answer()
        except ValueError as error:
            status = 400
            kind = "text/plain; charset=utf-8"
            body = str(error).encode()
        except OSError as error:
            status = 500
            kind = "text/plain; charset=utf-8"
            body = explain_error(error).encode(errors="replace")
        with suppress(ConnectionError):  # the page was closed
            self.send_response(status)
            for name, value in {
                **HEADERS,
                "Content-Type": kind,
                "Content-Length": str(len(body)),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def _answer(self) -> tuple[int, str, bytes]:
        if (
            self.server.names is not None
            and urlsplit(f"//{self.headers['Host']}").hostname not in self.server.names
        ):
            return 403, "text/plain", b"the page is not served under this name"
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path in FILES:
            name, kind = FILES[url.path]
            return 200, kind, (PAGE / name).read_bytes()
        if url.path == "/data":
            content = self.server.runs.data(query)
        elif url.path == "/layout":
            number = int(query.get("run", ""))
            runs = self.server.runs.runs
            if not 0 <= number < len(runs):
                raise ValueError(f"run must be from 0 to {len(runs) - 1}, not {number}")
            content = runs[number].layout()
        else:
            return 404, "text/plain", b"there is no such page"
        return 200, "application/json", json.dumps(content, allow_nan=False).encode()

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: the page asks every second."""
