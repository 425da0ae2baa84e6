"""The two calls of `benchmarks/gpu.sh`, on a CPU: a dry run of each, and what they do about parts that go wrong."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from commands import user_environment, warm_environment
from documents import commands

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "benchmarks" / "gpu.sh")
SLEEP = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


@pytest.fixture
def gpu(monkeypatch):
    """Imports a file of benchmarks/gpu, by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    return importlib.import_module


@pytest.fixture
def machine(gpu, monkeypatch):
    """Runs a call of these programs in this process, with limits as on a GPU; returns its exit code."""

    def call(folder: Path, *parts):
        found = [
            gpu("parts").Part(name, seconds, ["-c", code], [], needs)
            for name, seconds, code, *needs in parts
        ]
        monkeypatch.setitem(gpu("run").CALLS, "prove", lambda _: found)
        monkeypatch.setenv("PYTHON", sys.executable)
        if parts:
            monkeypatch.setattr(gpu("run"), "prepare", lambda *_: "")
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return gpu("run").main(["prove", "--output", str(folder)])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return call


def report(folder: Path, call: str) -> dict:
    return json.loads((folder / f"{call}.json").read_text())


@pytest.mark.before_release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", ["prove", "measure", "first"])
def test_a_dry_run_passes_and_reports(call, tmp_path):
    done = subprocess.run(
        [SCRIPT, call, "--dry-run", "--output", str(tmp_path)], capture_output=True, text=True,
        env=warm_environment(PYTHON="python"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(tmp_path, call)
    assert {part["outcome"] for part in found["parts"]} == {"passed"}
    page = (tmp_path / f"{call}.md").read_text()
    assert f"torch {torch.__version__}" in page
    if call == "first":
        assert "| device, fp32 | CPU | 20 |" in page
        assert "| shardzoo, compiled blocks | as published |" in page
        assert "| device, CUDA graph | CPU | 20 |" in page
        assert "| sums of gradients within products, bf16 | added afterwards | 20 |" in page
        assert page.count("| transformers, SDPA | none |") == 11
    elif call == "measure":
        assert "| rms_norm | 8 × 32 |" in page
        assert "| shardzoo | none |" in page
        assert "| shardzoo's trainer | as published |" in page
        assert "## Peak memory of the trainer, libai" in page
        assert "| gpt2 | float32 | 1 | native |" in page
    else:
        assert re.search(r"\| t5 \| T5ForConditionalGeneration \| \d", page)
        assert re.search(r"\| TP=2, ZeRO 1 \| CPU \| 20 \| .* \| same \|", page)


@pytest.mark.before_release
def test_the_commands_of_gpu_md(tmp_path):
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for command in commands("docs/gpu.md"):
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=warm_environment(PYTHON="python"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "| build | passed | " in (tmp_path / "dry" / "prove.md").read_text()


def test_a_call_takes_less_than_nine_minutes(gpu):
    parts = gpu("parts")
    assert parts.LONGEST_CALL == 540
    for name in ("prove", "measure"):
        found = parts.CALLS[name](Path())
        assert sum(part.seconds for part in found) + parts.PREPARATION < parts.LONGEST_CALL
        assert len({part.name for part in found}) == len(found)


def test_the_first_call_takes_less_than_eight(gpu):
    parts = gpu("parts")
    found = parts.first(Path())
    assert sum(part.seconds for part in found) + parts.WARM_PREPARATION <= 470
    assert parts.LIMITS == {"first": 470, "repair": 180}
    assert len({part.name for part in found}) == len(found)


def test_a_repair_runs_what_did_not_pass(gpu, tmp_path, monkeypatch, capsys):
    """In copies of a warm process, each in a group of its own."""
    run, parts = gpu("run"), gpu("parts")
    (tmp_path / "first.json").write_text(
        json.dumps({"parts": [{"part": "good", "outcome": "passed"}, {"part": "bad", "outcome": "failed (1)"},
                              {"part": "late", "outcome": "not run: the call's time is over"}]})
    )  # fmt: skip
    code = f"{SLEEP}import os; print('in', os.getcwd(), flush=True); raise SystemExit(3)"
    found = [
        parts.Part("good", 60, ["-c", "raise SystemExit(1)"], []),
        parts.Part("bad", 60, ["-c", code], []),
        parts.Part("late", 2, ["-c", "import time; time.sleep(60)"], []),
    ]
    monkeypatch.setitem(run.CALLS, "first", lambda _: found)
    monkeypatch.setattr(run, "prepare", lambda *_: "")
    monkeypatch.setattr(gpu("warm"), "PRELOADED", [])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run.main(["repair", "--output", str(tmp_path)]) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    outcomes = {one["part"]: one["outcome"] for one in report(tmp_path, "repair")["parts"]}
    assert outcomes == {"bad": "failed (3)", "late": "ended after 2 s"}
    assert f"   | in {ROOT}" in capsys.readouterr().out


def test_a_repair_without_a_first_call_says_so(gpu, tmp_path):
    with pytest.raises(SystemExit, match=r"first.json does not exist: a repair follows"):
        gpu("run").main(["repair", "--output", str(tmp_path)])


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(gpu, machine, tmp_path, capsys):
    lacking = "surely_not_installed"
    gpu("packages").ALL[lacking] = "surely-not-installed"
    parts = (
        ("fails", 60, "print('because'); raise SystemExit(3)"),
        ("hangs", 3, SLEEP + "print('begun', flush=True); time.sleep(60)"),
        ("lacks", 60, "", lacking),
        ("writes", 60, f"open({str(tmp_path / 'prove/writes.json')!r}, 'w').write('{{half')"),
        ("passes", 60, "import os; assert os.environ['HF_HUB_OFFLINE'] == '1'"),
    )
    try:
        began = time.monotonic()
        assert machine(tmp_path, *parts) == 1
        assert time.monotonic() - began < 50
    finally:
        del gpu("packages").ALL[lacking]
    outcomes = {one["part"]: one["outcome"] for one in report(tmp_path, "prove")["parts"]}
    assert outcomes == {
        "fails": "failed (3)", "hangs": "ended after 3 s", "lacks": "not run: surely-not-installed missing",
        "writes": "passed", "passes": "passed",
    }  # fmt: skip
    assert "unreadable" in report(tmp_path, "prove")["figures"]["writes"]
    shown = capsys.readouterr().out
    assert "   | because" in shown
    assert "   | begun" in shown
    assert "| hangs | ended after 3 s | " in (tmp_path / "prove.md").read_text()


def test_a_call_that_is_ended_early_leaves_its_report(machine, tmp_path):
    file = tmp_path / "pid"
    end = f"import os, signal, time; open({str(file)!r}, 'w').write(str(os.getpid())); "
    parts = (
        ("passes", 60, ""),
        ("ends", 60, f"{end}os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"),
        ("after", 60, ""),
    )
    with pytest.raises(SystemExit, match="143"):
        machine(tmp_path, *parts)
    found = [one["outcome"] for one in report(tmp_path, "prove")["parts"]]
    assert found == ["passed", "not run: the call was ended", "not run: the call was ended"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_without_a_gpu_nothing_runs_but_a_dry_run(machine, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert machine(tmp_path) == 2
    assert (
        "error: PyTorch finds no GPU here; --dry-run runs everything on the CPU"
        in capsys.readouterr().err
    )


def test_what_is_missing_is_said_at_once(gpu, machine, tmp_path, monkeypatch, capsys):
    run = gpu("run")
    monkeypatch.setattr(
        run, "missing", lambda names: [name for name in names if name in ("tyro", "deepspeed")]
    )
    assert machine(tmp_path) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith(
        "missing packages: tyro, deepspeed. benchmarks/gpu_wheels.sh gathers them for WHEELS"
    )
    assert shown.err == "error: nothing runs without tyro\n"


def test_a_part_that_does_not_exist_is_refused():
    done = subprocess.run(
        [SCRIPT, "prove", "--parts", "kernel"],
        capture_output=True,
        text=True,
        env=user_environment(PYTHON="python"),
    )
    assert done.returncode == 2
    assert "there is no part 'kernel'; use build, doctor, kernels, parity" in done.stderr


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of one empty module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_wheels_bring_what_is_not_there(gpu, tmp_path):
    packages, wheels, site = gpu("packages"), tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with pytest.raises(ValueError, match=r"has no \*\.whl; benchmarks/gpu_wheels\.sh gathers them"):
        packages.install(wheels, site, sys.executable)
    write_wheel(wheels, "of_nobody", "1.0")
    write_wheel(wheels, "tyro", importlib.metadata.version("tyro"))  # is there already
    assert packages.install(wheels, site, sys.executable) == ["of_nobody-1.0-py3-none-any.whl"]
    assert (site / "of_nobody.py").exists()
    assert not (site / "tyro.py").exists()


def test_the_wheels_are_of_what_the_parts_import(gpu):
    """In versions that constraints.txt knows, unless others depend on them."""
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/packages.py", "--names"], cwd=ROOT, capture_output=True
    )
    names = done.stdout.decode().split()
    assert {"tyro", "pydantic", "pytest-xdist", "einops"} <= set(names)
    assert not {"torch", "transformers", "deepspeed"} & set(names)
    assert not gpu("packages").missing(gpu("packages").ALL)


def test_losses_that_differ_are_found(gpu, tmp_path):
    training = gpu("device_training")
    comparison = training.Comparison("Runs", tmp_path / "runs.json")
    wanted = dict.fromkeys(range(1, 21), 1.0)
    comparison.add("same", "CPU", dict.fromkeys(wanted, 1.0 + 5e-05), wanted, 1e-4)
    assert not comparison.wrong
    comparison.add("one step", "CPU", wanted | {7: 1.001}, wanted, 1e-4)
    comparison.add("not finite", "CPU", wanted | {7: float("nan")}, wanted, 1e-4)
    comparison.add("none", "CPU", {}, wanted, 1e-4)
    comparison.attempt("raises", lambda run: {}["a key"])
    assert comparison.wrong
    [table] = json.loads((tmp_path / "runs.json").read_text())["tables"]
    assert [row[-1] for row in table["rows"]] == ["same", *["DIFFERENT"] * 3, "KeyError: 'a key'"]


def test_a_step_that_computes_something_else_gets_no_speed(gpu, tmp_path):
    bench = gpu("steps").Bench("libai", "cpu", True, tmp_path / "steps.json")
    bench.check("first", 2.0, 1.0)
    for loss, norm, wrong in (
        (2.03, 1.0, False),
        (2.05, 1.0, True),
        (2.0, 1.06, True),
        (float("nan"), 1.0, True),
    ):
        bench.wrong = False
        bench.attempt(
            "transformers", lambda loss=loss, norm=norm: bench.check("transformers", loss, norm)
        )
        assert bench.wrong == wrong
    bench.wrong = False
    bench.attempt("transformers, flash", lambda: {}["cannot run"])
    assert not bench.wrong  # of a rival: named, and no fault of ours
    bench.attempt("shardzoo", lambda: {}["cannot run"])
    assert bench.wrong


def test_a_device_that_computes_something_else_is_found(gpu, monkeypatch):
    """The CPU passes for a GPU whose RMSNorm is off by a ten-thousandth."""
    norm, parity = importlib.import_module("shardzoo.mpu").RMSNorm, gpu("device_parity")
    compare, right = parity.check_case, norm.forward

    def forward(*inputs, **options):
        found = right(*inputs, **options)
        return (found[0] * 1.0001, *found[1:]) if isinstance(found, tuple) else found * 1.0001

    def with_a_wrong_device(name, row, folder, run_mesh, *arguments, **options):
        def run(size, function, *given):
            with monkeypatch.context() as patch:
                patch.setattr(norm, "forward", forward)
                return run_mesh(size, function, *given)

        return compare(name, row, folder, run, *arguments, **options)

    monkeypatch.setattr(parity, "check_case", with_a_wrong_device)
    row, problems = parity.compare("T5ForConditionalGeneration", "cpu", False)
    assert row[:2] == ["t5", "T5ForConditionalGeneration"]
    assert [problem for problem in problems if "logits differ by" in problem]
