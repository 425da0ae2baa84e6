"""`shardzoo board` shows runs that grow, restart or are damaged; docs/board.md promises what is tested here."""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial

import pytest
from browser import CHROMIUM, Browser
from commands import user_environment
from documents import commands
from safetensors import safe_open
from tiny_models import save_model

from shardzoo.cli import convert
from shardzoo.cli.board.command import (
    HEADERS,
    Board,
    Curve,
    Metrics,
    main,
    make_server,
    on_one_axis,
    running_means,
)
from shardzoo.files.json_digest import add_digest

LATER = 10.0


def lines(steps, name="train/loss", value=lambda step: float(step)) -> str:
    return "".join(json.dumps({"step": step, name: value(step)}) + "\n" for step in steps)


def make_run(folder, steps=range(1, 4)):
    folder.mkdir(parents=True)
    (folder / "arguments.yaml").write_text("{}")
    if steps:
        (folder / "metrics.jsonl").write_text(lines(steps))
    return folder


def read(metrics: Metrics) -> dict[str, list[tuple[float, float]]]:
    assert not metrics.read(time.monotonic() + LATER)
    return {
        name: list(zip(curve.steps, curve.values, strict=True))
        for name, curve in metrics.curves.items()
    }


def diagonal(steps) -> dict[str, list[tuple[float, float]]]:
    return {"train/loss": [(step, step) for step in steps]}


def test_a_growing_file_is_read_from_where_it_was_left(tmp_path, monkeypatch):
    file, metrics = tmp_path / "metrics.jsonl", Metrics(tmp_path / "metrics.jsonl")
    assert read(metrics) == {}
    file.write_text(lines([1, 2]))
    assert read(metrics) == diagonal([1, 2])
    parsed = []
    monkeypatch.setattr(
        metrics, "_add", lambda line, add=metrics._add: (parsed.append(line), add(line))
    )
    cut = lines([3])
    with file.open("a") as more:
        more.write(cut[:9])
        more.flush()
        assert read(metrics) == diagonal([1, 2])  # the last line is not complete
        before = metrics.changes
        assert read(metrics) == diagonal([1, 2])
        assert metrics.changes == before
        more.write(cut[9:])
    assert read(metrics) == diagonal([1, 2, 3])
    assert metrics.changes > before
    assert parsed == [cut.strip().encode()]


def test_another_file_is_read_from_its_beginning(tmp_path):
    file, metrics = (
        make_run(tmp_path / "run", range(1, 9)) / "metrics.jsonl",
        Metrics(tmp_path / "run/metrics.jsonl"),
    )
    read(metrics)
    (tmp_path / "new").write_text(lines(range(1, 6)))  # a resumed run replaces the file
    (tmp_path / "new").rename(file)
    assert read(metrics) == diagonal(range(1, 6))
    file.write_text(lines(range(11, 31)))  # the same number of the disk's, and longer
    assert read(metrics) == diagonal(range(11, 31))
    file.write_text("")
    before = metrics.changes
    assert read(metrics) == {}
    file.write_text(lines([1]))
    assert read(metrics) == diagonal([1])
    file.unlink()
    assert read(metrics) == {}
    assert metrics.changes > before + 1


DAMAGED = (
    '{"step": 2, "train/loss"', "", "\0\xff", "[1]", "7", '{"step": "2", "train/loss": 2}', '{"train/loss": 2}',
    '{"step": 1.5, "train/loss": 2}', '{"step": true, "train/loss": 2}', '{"step": 2, "train/loss": "2"}',
    '{"step": 2, "train/loss": 1' + 400 * "0" + "}", '{"step": 1' + 400 * "0" + ', "train/loss": 2}', 99_999 * "[",
    '{"step": 2, "train/loss": true}', "x" * 3_000_000,
)  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lines_are_skipped(tmp_path, damaged):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f"{lines([1])}{damaged}\n{lines([3])}", encoding="latin-1")
    assert read(Metrics(file)) == diagonal([1, 3])


@pytest.mark.before_release
def test_reading_stops_in_time_and_goes_on(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(range(200_000)))
    metrics, rounds = Metrics(file), 0
    while metrics.read(time.monotonic() + 0.01):
        rounds += 1
    assert rounds > 1
    assert len(metrics.curves["train/loss"].steps) == 200_000


def curve(points) -> Curve:
    made = Curve()
    for step, value in points:
        made.steps.append(step)
        made.values.append(value)
    return made


def by_hand(points, edges) -> list[float | None]:
    """Smallest and largest value of each interval, one after the other."""
    found = []
    for place, start in enumerate(edges):
        end = edges[place + 1] if place + 1 < len(edges) else math.inf
        inside = [value for step, value in points if start <= step < end and not math.isnan(value)]
        found += [min(inside, default=None), max(inside, default=None)]
    return found


@pytest.mark.parametrize("width", [1, 7, 64])
def test_intervals_keep_every_peak(width):
    rng = random.Random(width)
    long = [(step, rng.choice([rng.random(), math.nan])) for step in range(3, 1003)]
    ragged = [(step, rng.random()) for step in sorted(rng.sample(range(400, 2000), 333))]
    late = [(2500, 4.0)]
    axis, values = on_one_axis([curve(long), None, curve(ragged), curve(late)], width)
    assert len(axis) == 2 * width
    assert axis == sorted(set(axis))
    edges = axis[::2]
    assert edges[0] == 3
    for points, row in zip((long, [], ragged, late), values, strict=True):
        assert row == by_hand(points, edges)


def test_few_steps_are_shown_as_they_are():
    first, second = (
        [(1, 0.5), (2, math.inf), (5, 1.0)],
        [(9, 9.0), (2, 2.0), (3, math.nan)],
    )  # not in order
    assert on_one_axis([curve(first), curve(second)], 10) == (
        [1, 2, 3, 5, 9], [[0.5, None, None, 1.0, None], [None, 2.0, None, None, 9.0]],
    )  # fmt: skip
    assert on_one_axis([curve(first), curve(second)], 10, 2, 5) == (
        [2, 3, 5],
        [[None, None, 1.0], [2.0, None, None]],
    )
    assert on_one_axis([None, curve([])], 10) == ([], [[], []])
    apart = [curve([(run + 100 * step, 1.0) for step in range(9)]) for run in range(30)]
    assert len(on_one_axis(apart, 5)[0]) == 10  # each has few, all have many


def test_means_go_over_a_share_of_the_shown_steps():
    rng = random.Random(1)
    points = [(step, rng.choice([rng.random(), math.nan])) for step in range(500)]
    for axis, first in (([*range(500)], 0), ([*range(250, 500)], 250), ([*range(0, 499, 7)], 0)):
        found = running_means(axis, curve(points), first)
        for at, mean in zip(axis, found, strict=True):
            window = min((axis[-1] - axis[0]) / 50, (at - axis[0]) / 4)
            inside = [v for s, v in points if at - window < s <= at and s >= first and v == v]
            if inside:
                assert mean == pytest.approx(sum(inside) / len(inside))
            else:  # The last one that there is.
                before = [v for s, v in points if first <= s <= at and v == v]
                assert mean == (pytest.approx(before[-1]) if before else None)
    assert running_means([1, 2, 3], curve([(2, 5.0)])) == [None, 5.0, None]
    assert running_means([1, 2], None) == [None, None]


def test_the_table_shows_the_mean_of_the_last_losses(tmp_path):
    """The loss of one batch says little. Mean losses are no chart of their own."""
    run = make_run(tmp_path / "a", range(1, 41))
    with served(run) as url:
        assert ask(f"{url}data")["runs"][0]["last"]["train/mean_loss"] == 39.5
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(10, 410, 10):
            record = {"step": step, "train/loss": 0.0, "train/mean_loss": step / 10}
            file.write(json.dumps(record) + "\n")
    with served(run) as url:
        shown = ask(f"{url}data")
        assert shown["runs"][0]["last"]["train/mean_loss"] == 39.5
        assert [chart["name"] for chart in shown["charts"]] == ["train/loss"]
        assert shown["charts"][0]["means"][0] == list(range(1, 41))


@contextmanager
def served(*runs, host="127.0.0.1"):
    with make_server(Board(runs=runs, port=0, host=host)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def ask(url):
    with urllib.request.urlopen(url, timeout=LATER) as answer:
        return json.load(answer)


def test_the_answer_changes_with_the_runs(tmp_path):
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "empty", ())
    with served(*runs) as url:
        first = ask(f"{url}data")
        assert [run["step"] for run in first["runs"]] == [3, None]
        assert first["charts"] == [
            {
                "name": "train/loss",
                "steps": [1, 2, 3],
                "values": [[1, 2, 3], [None] * 3],
                "means": [[1, 2, 3], [None] * 3],
            }
        ]
        assert ask(f"{url}data?seen={first['revision']}") == {
            "revision": first["revision"],
            "more": False,
        }
        (runs[1] / "checkpoints/step-000007").mkdir(parents=True)
        (runs[1] / "checkpoints/best").write_text("step-000007\n")
        second = ask(f"{url}data?seen={first['revision']}")
        assert (second["runs"][1]["checkpoints"], second["runs"][1]["best"]) == ([7], "step-000007")
        (runs[0] / "checkpoints/best").mkdir(parents=True)
        broken = ask(f"{url}data")
        assert "checkpoints/best is not a regular file" in broken["runs"][0]["problem"]
        assert broken["runs"][1]["problem"] == ""
        assert broken["charts"] == first["charts"]
        shutil.rmtree(runs[0] / "checkpoints")
        with (runs[1] / "metrics.jsonl").open("w") as file:
            file.write('{"step": 4, "train/loss": NaN, "final/loss": 1e999}\n')
        third = ask(f"{url}data?seen={second['revision']}&first=2&last=3")
        assert third["charts"] == [
            {
                "name": "train/loss",
                "steps": [2, 3],
                "values": [[2, 3], [None, None]],
                "means": [[2, 3], [None, None]],
            }
        ]
        assert third["runs"][1]["last"] == {
            "train/loss": "nan",
            "final/loss": "inf",
            "train/mean_loss": "nan",
        }


def write_best(content):
    return lambda run: (run / "checkpoints" / "best").write_bytes(content)


def write_metrics(*records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    return lambda run: (run / "metrics.jsonl").write_text(text)


def replace_metrics(target):
    def replace(run):
        (run / "metrics.jsonl").unlink(missing_ok=True)
        (run / "metrics.jsonl").symlink_to(target)

    return replace


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 32)


def write_manifest(**shard):
    def write(run):
        folder = run / "checkpoints" / "step-000001"
        folder.mkdir()
        record = {"shape": [4, 4], "dim": 0, **shard}
        tensor = {"shape": [4, 4], "dtype": "float32", "shard": record, "sha256": ["a", "b"]}
        values = {
            "format_version": 1,
            "model_type": "x",
            "tensor_parallel_size": 2,
            "vocab_size": 1,
            "padded_vocab_size": 1,
            "tensors": {"w": tensor},
            "ties": {},
            "extras": {},
        }
        (folder / "manifest.json").write_text(json.dumps(add_digest(values)))

    return write


ODD_RUNS = {
    "best is a pipe": lambda run: os.mkfifo(run / "checkpoints" / "best"),
    "best is a loop": lambda run: (run / "checkpoints" / "best").symlink_to("best"),
    "best is no text": write_best(b"\xff\xfe"),
    "best has a long name": write_best(b"x" * 300),
    "best has a NUL": write_best(b"step-000001\0"),
    "best is huge": lambda run: make_huge(run / "checkpoints" / "best"),
    "checkpoints are a file": lambda run: (
        (run / "checkpoints").rmdir(),
        (run / "checkpoints").write_text("x"),
    ),
    "metrics are a loop": replace_metrics("metrics.jsonl"),
    "metrics are endless": replace_metrics("/dev/zero"),
    "steps beyond all charts": write_metrics(
        *({"step": step, "loss": 1.0} for step in [-(10**308), *range(400), 10**308])
    ),
    "a step beyond all floats": write_metrics({"step": 10**400, "loss": 1.0}),
    "a value beyond all floats": write_metrics({"step": 1, "loss": 10**400}),
    "too many names": write_metrics({"step": 1, **{f"n{number}": 1 for number in range(5000)}}),
    "a split of no size": write_manifest(unit=0),
    "a split by a text": write_manifest(dim="a"),
    "a split beyond all floats": write_manifest(unit=10**400),
    "a shape that is no shape": write_manifest(shape=[1e308, 4]),
    "a shape beyond all memory": write_manifest(shape=[10**30, 4]),
}


def test_an_odd_folder_is_its_own_problem(tmp_path):
    good = make_run(tmp_path / "good")
    odd = []
    for number, prepare in enumerate(ODD_RUNS.values()):
        run = make_run(tmp_path / str(number), ())
        (run / "checkpoints").mkdir()
        prepare(run)
        odd.append(run)
    with served(*odd, good) as url:
        shown = ask(f"{url}data?width=100")
        assert [run["step"] for run in shown["runs"]][-1] == 3
        problems = dict(zip(ODD_RUNS, [run["problem"] for run in shown["runs"]], strict=False))
        for name in ("best is a pipe", "best is a loop", "best is huge", "too many names"):
            assert problems[name], name
        for number, name in enumerate(ODD_RUNS):
            layout = ask(f"{url}layout?run={number}")
            assert layout.get("error") or layout["tensors"], name


@pytest.mark.parametrize("size", [2, 3])
def test_the_layout_is_that_of_the_files(tmp_path, size):
    save_model(tmp_path / "gpt2", "GPT2LMHeadModel", "gpt2", n_embd=50, n_head=25)
    run = make_run(tmp_path / "run")
    folder = run / "checkpoints/step-000003"
    folder.parent.mkdir()
    assert convert.main(["split", str(tmp_path / "gpt2"), str(folder), "--tp", str(size)]) == 0
    with served(run) as url:
        shown = ask(f"{url}layout?run=0")
        assert (shown["step"], shown["ranks"]) == (3, size)
        for rank in range(size):
            with safe_open(folder / f"rank_{rank:02}.safetensors", "pt") as file:
                stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            held = {
                t["name"]: t["parts"][rank] if t["parts"] else t["shape"] for t in shown["tensors"]
            }
            assert {name: held[name] for name in stored} == stored
            assert stored
        (folder / "manifest.json").write_text("{")
        assert "manifest.json" in ask(f"{url}layout?run=0")["error"]
        (folder / "manifest.json").unlink()
        assert "manifest.json" in ask(f"{url}layout?run=0")["error"]


REFUSED = {
    "../../etc/passwd": 404, "/..%2f..%2fetc/passwd": 404, "page/page.js": 404, "uPlot.LICENSE": 404, "layout": 400,
    "layout?run=1": 400, "layout?run=-1": 400, "layout?run=../a": 400, "data?width=x": 400, "data?first=x": 400,
}  # fmt: skip


def test_requests_reach_nothing_else(tmp_path):
    with served(make_run(tmp_path / "a")) as url:
        connection = http.client.HTTPConnection(url.split("/")[2], timeout=LATER)
        for path, status in REFUSED.items():
            connection.request("GET", f"/{path}")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status, path
        for host, status in {
            "evil.example": 403,
            "evil.example:6007": 403,
            "localhost:1": 200,
            "127.0.0.1": 200,
        }.items():
            connection.request("GET", "/", headers={"Host": host})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status, host
            assert HEADERS.items() <= dict(answer.getheaders()).items()
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(url, data=b"x")


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_is_served(tmp_path):
    with served(make_run(tmp_path / "a"), host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert ask(f"{url}data")["runs"]


def test_users_mistakes_are_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    with served(run) as url:
        port = url.split(":")[2].strip("/")
        for words, said in (
            ([tmp_path / "none"], "none is no folder"),
            ([tmp_path / "file"], "file is no folder"),
            ([tmp_path], "holds no run"),
            ([run, "--port", port], f"port {port}"),
            ([run, "--port", "65536"], "from 0 to 65535, not 65536"),
            ([run, "--host", "192.0.2.1"], "192.0.2.1"),
            ([], "at least one run"),
        ):
            assert main([*map(str, words)]) == 2
            shown = capsys.readouterr().err
            assert said in " ".join(shown.split())
            assert shown.startswith("error: ")


def test_the_command_of_the_page_serves_until_it_is_interrupted(tmp_path):
    [command] = commands("docs/board.md")
    for name in ("quickstart", "t5-quickstart"):
        make_run(tmp_path / "runs" / name)
    words = [*shlex.split(command), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background jobs, which tests may be, ignore the interrupt.
    unblock = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        words, cwd=tmp_path, env=user_environment(), preexec_fn=unblock, **pipes
    ) as process:
        url = re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        assert [run["name"] for run in ask(f"{url}data")["runs"]] == [
            "runs/quickstart",
            "runs/t5-quickstart",
        ]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "interrupted\n"


LOSS = "plots.get('train/loss').plot"
HOSTILE = "<img src=x onerror=console.error(1)>"


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"
)
def test_a_browser_follows_runs(tmp_path):
    runs = make_run(tmp_path / "a", range(5000)), make_run(tmp_path / HOSTILE, range(1, 900, 3))
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(lines([3], HOSTILE) + lines([4, 8], "valid/loss"))
        file.write(lines([4], "train/mfu", lambda step: 0.25) + lines([4], "train/samples"))
        file.write(lines([4], "train/router/load/0"))
    with served(*runs) as url, Browser(tmp_path / "profile") as page:
        page.open(url)
        page.wait("plots.size === 5")
        assert page.evaluate("document.querySelectorAll('#runs td').length") == 22
        assert HOSTILE in page.evaluate("document.getElementById('runs').textContent")
        assert page.evaluate("[...document.querySelectorAll('h2')].map((h) => h.textContent)") == [
            "training loss (nats per target token)", "held-out loss (nats per target token)", HOSTILE,
            "share of the device's peak arithmetic (%)", "layer 0: rows of the busiest expert (1 is the mean of all)",
        ]  # fmt: skip
        assert page.evaluate("plots.get('train/mfu').plot.data[2][0]") == 25
        assert page.evaluate("document.querySelector('#layers h2').textContent").startswith("layer")
        assert page.evaluate("document.getElementById('all').hidden")
        drawn = (
            "{const c = document.querySelector('canvas'), "
            "d = c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        )
        page.wait(f"(() => {drawn}.data; return new Set(new Uint32Array(d.buffer)).size > 20}})()")
        with (runs[0] / "metrics.jsonl").open("a") as file:
            file.write(lines([5000], value=lambda step: 7777.0))
        assert page.wait(f"{LOSS}.data[1].at(-1) === 7777") < 5
        (runs[0] / "metrics.jsonl").write_text(lines(range(4000)))  # overwritten
        page.wait(f"{LOSS}.data[1].at(-1) === 3999")
        place = "document.querySelector('.u-over').getBoundingClientRect()"
        x, y, width, height = page.evaluate(
            f"(({{x, y, width, height}}) => [x, y, width, height])({place})"
        )
        page.click(x + 0.5 * width, y + height / 2, to=(x + 0.6 * width, y + height / 2))
        page.wait(
            f"range !== null && {LOSS}.data[0].every((step) => step >= range[0] && step <= range[1])"
        )
        assert page.evaluate(f"{LOSS}.data[0]") == list(
            range(page.evaluate("Math.ceil(range[0])"), page.evaluate("Math.floor(range[1])") + 1)
        )
        assert not page.evaluate("document.getElementById('all').hidden")
        page.evaluate("document.getElementById('all').click()")
        page.wait(f"{LOSS}.data[0][0] === 0")
        page.evaluate("document.querySelector('input').click()")
        assert page.evaluate(f"{LOSS}.series[1].show") is False
        page.evaluate("document.querySelector('#runs button').click()")
        page.wait("document.getElementById('layout').textContent.includes('no checkpoint yet')")
        page.evaluate("setTimeout(() => { location.hash = '#layout-1' })")  # it loads the page anew
        page.wait("document.querySelector('main')?.hidden")
        page.wait("document.getElementById('layout').textContent.includes('no checkpoint yet')")
        assert page.problems == []
        assert page.requests
        assert all(request.startswith((url, "data:,")) for request in page.requests)
