"""`shardzoo bench kernels` and `shardzoo doctor`."""

from __future__ import annotations

import json

import pytest
import torch

from shardzoo.cli import bench, doctor
from shardzoo.ops.bench import measure
from shardzoo.ops.bench.cases import cases

QUICK = ["kernels", "--device", "cpu", "--scale", "0.001", "--repetitions", "2", "--no-compile"]


def test_bench_writes_what_it_measured(tmp_path, capsys):
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    chosen = ["--op", "rms_norm", "bias_gelu", "--dtype", "float32", "--json", str(report), "--plot", str(picture)]
    assert bench.main([*QUICK, *chosen]) == 0
    assert "rms_norm" in capsys.readouterr().out
    results = json.loads(report.read_text())["results"]
    assert [result["op"] for result in results] == ["rms_norm", "bias_gelu"]
    assert all(result["error"] is None and result["timings"]["eager"]["median"] > 0 for result in results)
    assert picture.stat().st_size > 1000


def test_bench_measures_attention_beside_that_of_pytorch(tmp_path):
    report = tmp_path / "out.json"
    chosen = ["--op", "attention", "attention_bias", "--dtype", "float32", "--json", str(report)]
    assert bench.main([*QUICK, *chosen]) == 0
    causal, trained = json.loads(report.read_text())["results"]
    assert {"ours", "eager", "sdpa_flash"} <= set(causal["timings"])
    assert "sdpa_cudnn" in causal["missing"]
    assert trained["timings"]["ours backward out"]["median"] > 0


def test_bench_refuses_a_speed_for_a_wrong_result(monkeypatch, capsys):
    wrong = next(case for case in cases("cpu", 0.001) if case.name == "bias_gelu")
    right = wrong.ours
    wrong.ours = lambda t: right(t) * (1.001 if t["x"].dtype == torch.float32 else 1.0)
    monkeypatch.setattr(bench, "cases", lambda device, scale: [wrong])
    assert bench.main([*QUICK, "--dtype", "float32"]) == 1
    assert "WRONG: bias_gelu float32: output is off by" in capsys.readouterr().out
    result = measure.measure(wrong, "cpu", torch.float32, repetitions=1, compiled=False)
    assert not result.timings


def test_bench_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    """Of an op: the others are measured. Of another contender: ours is measured, and what failed is named."""
    first, second = (case for case in cases("cpu", 0.001) if case.name in ("rms_norm", "bias_gelu"))

    def fail(tensors):
        raise RuntimeError("out of memory\nand more")

    first.ours, second.rivals = fail, {"liger_gelu": fail}
    monkeypatch.setattr(bench, "cases", lambda device, scale: [first, second])
    report = tmp_path / "out.json"
    assert bench.main([*QUICK, "--dtype", "float32", "--json", str(report)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: rms_norm float32: failed with RuntimeError: out of memory\n" in shown
    assert "not measured: liger_gelu of bias_gelu float32: RuntimeError: out of memory\n" in shown
    failed, measured = json.loads(report.read_text())["results"]
    assert not failed["timings"]
    assert measured["timings"]["ours"]["median"] > 0
    assert "liger_gelu" in measured["missing"]


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["everything"], 2), ([*QUICK, "--op", "rotation"], 2)])
def test_bench_misuse(arguments, status, capsys):
    assert bench.main(arguments) == status


def test_doctor_reports(monkeypatch, capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for heading in ("kernel library", "C++ compiler", "nvcc", "cpu tensors", "triton"):
        assert heading in shown
    monkeypatch.setenv("SHARDZOO_KERNELS", "cuda")
    assert doctor.main([]) == 1
    assert "cuda kernels do not run on cpu tensors" in capsys.readouterr().out
