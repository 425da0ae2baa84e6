"""`shardzoo bench kernels` and `shardzoo doctor`."""

from __future__ import annotations

import json

import pytest
import torch

from shardzoo.cli import bench, doctor
from shardzoo.ops.bench import measure, rivals
from shardzoo.ops.bench.cases import cases

QUICK = ["kernels", "--device", "cpu", "--scale", "0.001", "--repetitions", "2", "--no-compile"]


def test_bench_writes_what_it_measured(tmp_path, capsys):
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    chosen = [
        "--op",
        "rms_norm",
        "bias_gelu",
        "--dtype",
        "float32",
        "--json",
        str(report),
        "--plot",
        str(picture),
    ]
    assert bench.main([*QUICK, *chosen]) == 0
    assert "rms_norm" in capsys.readouterr().out
    results = json.loads(report.read_text())["results"]
    assert [result["op"] for result in results] == ["rms_norm", "bias_gelu"]
    assert all(
        result["error"] is None and result["timings"]["eager"]["median"] > 0 for result in results
    )
    assert picture.stat().st_size > 1000


def test_bench_measures_rows_and_columns_that_are_asked_for(tmp_path, capsys):
    report = tmp_path / "out.json"
    chosen = [
        "--op",
        "rms_norm",
        "bias_dropout_residual",
        "--dtype",
        "float32",
        "--shape",
        "8x33",
        "16x40",
    ]
    assert bench.main([*QUICK, *chosen, "--json", str(report)]) == 0
    shapes = [
        (result["op"], result["shape"]) for result in json.loads(report.read_text())["results"]
    ]
    norms = [("rms_norm", shape) for shape in ([8, 33], [16, 40])]
    residuals = [("bias_dropout_residual", shape) for shape in ([8, 1, 33], [8, 2, 40])]
    assert sorted(shapes) == sorted(norms + residuals)
    for wrong in ("7x32", "8x", "8x0", "8*32"):
        assert bench.main([*QUICK, "--shape", wrong]) == 2
        assert f"such as 8192x768, not {wrong!r}" in capsys.readouterr().err


def test_bench_measures_attention_beside_that_of_pytorch_and_transformers(tmp_path, capsys):
    report = tmp_path / "out.json"
    chosen = [
        "--op",
        "attention",
        "attention_causal",
        "attention_capped",
        "attention_bias",
        "--dtype",
        "float32",
        "--length",
        "8",
        "33",
    ]
    assert bench.main([*QUICK, *chosen, "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [result["shape"] for result in results] == [[1, 8, 8, 64]] * 4 + [[1, 8, 33, 64]] * 4
    timings = {result["op"]: set(result["timings"]) for result in results}
    assert all({"ours", "eager", "written_out"} <= contenders for contenders in timings.values())
    assert all(("sdpa" in timings[name]) == (name != "attention_capped") for name in timings)
    assert {"t5_eager", "t5_sdpa"} <= timings["attention_bias"]
    assert "gemma2_eager" in timings["attention_capped"]
    assert results[3]["timings"]["ours backward out"]["median"] > 0
    assert not any(result["missing"] for result in results)
    assert "written_out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["attention", "attention_causal", "attention_capped", "attention_bias"]
)
def test_all_contenders_for_attention_compute_the_same(name):
    case = next(case for case in cases("cpu", 1 / 128, length=33) if case.name == name)
    tensors = case.make("cpu", torch.float64)
    causal = name in ("attention_causal", "attention_capped")
    softcap = 2.0 if name == "attention_capped" else None
    written, others = rivals.attention(causal, 1e-12 if name == "attention_bias" else 0.0, softcap)
    with torch.no_grad():
        scores = tensors["x"] @ tensors["k"].mT / 8 + tensors.get("written_bias", 0.0)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        hidden = (
            torch.arange(33)[None] > torch.arange(33)[:, None] if causal else torch.zeros(1) > 0
        )
        wanted = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ tensors["v"]
        for run in (written, *others.values()):
            torch.testing.assert_close(
                run(tensors), wanted, rtol=0, atol=1e-6
            )  # eager's softmax is in fp32
        if name != "attention_bias":  # its case has dropout
            torch.testing.assert_close(case.ours(tensors), wanted, rtol=0, atol=1e-6)


def test_bench_refuses_a_speed_for_a_wrong_result(monkeypatch, capsys):
    wrong = next(case for case in cases("cpu", 0.001) if case.name == "bias_gelu")
    right = wrong.ours
    wrong.ours = lambda t: right(t) * (1.001 if t["x"].dtype == torch.float32 else 1.0)
    monkeypatch.setattr(bench, "cases", lambda device, scale, length=0, shape=None: [wrong])
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
    monkeypatch.setattr(bench, "cases", lambda device, scale, length=0, shape=None: [first, second])
    report = tmp_path / "out.json"
    assert bench.main([*QUICK, "--dtype", "float32", "--json", str(report)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: rms_norm float32: failed with RuntimeError: out of memory\n" in shown
    assert "not measured: liger_gelu of bias_gelu float32: RuntimeError: out of memory\n" in shown
    failed, measured = json.loads(report.read_text())["results"]
    assert not failed["timings"]
    assert measured["timings"]["ours"]["median"] > 0
    assert "liger_gelu" in measured["missing"]


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["everything"], 2), ([*QUICK, "--op", "rotation"], 2)]
)
def test_bench_misuse(arguments, status, capsys):
    assert bench.main(arguments) == status


def test_doctor_reports(set_kernels, capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for heading in ("kernel library", "C++ compiler", "nvcc", "cpu tensors", "triton"):
        assert heading in shown
    set_kernels("cuda")
    assert doctor.main([]) == 1
    assert "cuda kernels do not run on cpu tensors" in capsys.readouterr().out
