"""`pretrain.py` from the command line: what it leaves, that it goes on, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import user_environment

ROOT = Path(__file__).parents[2]
PRETRAIN = str(ROOT / "pretrain.py")
QUICKSTART = Path("runs", "quickstart")
TINY = """\
hidden_size: 48
num_hidden_layers: 1
sequence_length: 32
vocab_size: 300
micro_batch_size: 4
train_steps: 6
warmup_steps: 2
save_interval: 3
eval_sequences: 4
final_eval_sequences: 8
held_out_fraction: 0.3
"""


def run(*command: str, cwd: Path, seconds: int = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user would, away from the variables of this test's own processes."""
    variables = user_environment(COLUMNS="200", MAKEFLAGS=None, **environment)
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=seconds)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with a small corpus and a configuration for it."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "texts").mkdir()
    for i in range(12):
        lines = [f"def function_{i}_{j}(value):\n    return value + {j}\n\n" for j in range(40)]
        (folder / "texts" / f"{i}.txt").write_text("".join(lines))
    (folder / "tiny.yaml").write_text(TINY + f"data: {folder / 'texts'}\n")
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "pretrain.py"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def finished(workspace) -> subprocess.CompletedProcess[str]:
    """The README's own command, on a tiny model: `deepspeed pretrain.py --model-parallel-size 2`, as make has it."""
    return run("make", "pretrain", cwd=workspace, VENV=sys.prefix, ARGS="--config tiny.yaml --eval_interval 3")


def metrics(folder: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def test_a_run_starts_what_is_missing_and_ends_well(finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "--model-parallel-size 2 needs 2 processes; starting them on this machine" in finished.stdout
    assert "Traceback" not in finished.stdout + finished.stderr


def test_a_run_leaves_what_it_promises(finished, workspace):
    folder = workspace / QUICKSTART
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000003", "step-000006"]
    checkpoint = folder / "checkpoints" / "step-000006"
    assert {"config.json", "manifest.json", "rank_00.safetensors", "rank_01.safetensors", "trainer_state.json"} <= {
        p.name for p in checkpoint.iterdir()
    }
    assert len(metrics(folder, "train/loss")) == 6
    assert "held-out loss" in finished.stdout
    assert "the exported model continues" in finished.stdout


def test_transformers_loads_the_export_and_agrees(finished, workspace):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = workspace / QUICKSTART / "hf"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def function_1_2(value):\n    return value"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))

    from shardzoo.data import GPTDataset, IndexedDataset
    from shardzoo.pretraining.recipe import held_out_loss, held_out_samples

    samples = held_out_samples(GPTDataset(IndexedDataset(workspace / QUICKSTART / "data" / "valid"), 32, seed=0))
    (native,) = metrics(workspace / QUICKSTART, "final/loss")
    assert held_out_loss(folder, [samples[i] for i in range(8)]) == pytest.approx(native, abs=1e-5)


def test_a_second_run_does_not_touch_the_first(finished, workspace):
    before = (workspace / QUICKSTART / "metrics.jsonl").read_bytes()
    again = run(sys.executable, PRETRAIN, "--config", "tiny.yaml", "--output-dir", str(QUICKSTART), cwd=workspace)
    assert again.returncode == 2
    assert "holds another run (saved at step 6); resume it with --resume" in again.stderr
    assert "Traceback" not in again.stdout + again.stderr
    assert (workspace / QUICKSTART / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_resumes_from_the_saved_step(workspace):
    command = [sys.executable, PRETRAIN, "--config", "tiny.yaml", "--output-dir", "killed"]
    process = subprocess.Popen([*command, "--train-steps", "100000"], cwd=workspace, stdout=subprocess.DEVNULL)
    checkpoint = workspace / "killed" / "checkpoints" / "step-000003"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = max(int(p.name.split("-")[1]) for p in checkpoint.parent.iterdir() if not p.name.startswith("."))
    resumed = run(*command, "--resume", "--train-steps", str(saved + 2), cwd=workspace)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resuming from step {saved}" in resumed.stdout
    assert len(metrics(workspace / "killed", "train/loss")) == saved + 2


def test_torchrun(workspace):
    line = "torchrun --nproc-per-node 2 pretrain.py --model-parallel-size 2"
    done = run(*line.split(), "--config", "tiny.yaml", cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr


BEFORE_ANY_PROCESS = [
    (["--model-parallel-size", "5"], "12 attention heads cannot be split 5 ways; use a model-parallel size of 1, 2"),
    (["--model-paralle-size", "2"], "--model-parallel-size INT"),
    (["--sequence-length", "1000"], "256 positions"),
    (["--model", "gpt5"], "'gpt5' is neither a preset"),
    (["--model", "t5-small"], "trains causal language models"),
    (["--global-batch-size", "7"], "use a multiple of 4"),
    (["--resume"], "--output-dir"),
    (["--resume", "--output-dir", "nothing"], "holds no run"),
    (["--precision", "bf16", "--zero-stage", "0"], "use 1 or 2"),
    (["--deepspeed-config", "nothing.json"], "nothing.json cannot be read: No such file"),
]
ON_EVERY_RANK = [
    (["--data", "nowhere"], "nowhere does not exist"),
    (["--data", "empty"], "empty holds no"),
    (["--output-dir", "texts"], "texts holds files that do not belong to a run"),
    (["--output-dir", "another"], "holds another run (with nothing saved yet)"),
]


def outcome(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and messages of `pretrain.py` in this process, which may be one of several ranks."""
    import contextlib
    import io

    import torch.distributed as dist

    import shardzoo.cli.pretrain

    size = dist.get_world_size() if dist.is_initialized() else 1
    os.environ |= {"RANK": str(dist.get_rank() if size > 1 else 0), "WORLD_SIZE": str(size), "COLUMNS": "200"}
    here = os.getcwd()
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as messages:
        try:
            code = shardzoo.cli.pretrain.main(["--config", "tiny.yaml", *arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            os.chdir(here)
    return code, messages.getvalue()


@pytest.mark.parametrize(("arguments", "message"), BEFORE_ANY_PROCESS)
def test_a_mistake_is_one_message_with_exit_code_2(workspace, monkeypatch, arguments, message):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # restored afterwards
    before = sorted(workspace.rglob("*"))
    code, messages = outcome(arguments, workspace)
    assert code == 2
    assert messages.count(message) == 1
    assert sorted(workspace.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "message"), ON_EVERY_RANK)
def test_a_mistake_that_one_rank_finds_ends_all(workspace, run_ranks, arguments, message):
    (workspace / "empty").mkdir(exist_ok=True)
    (workspace / "another").mkdir(exist_ok=True)
    (workspace / "another" / "arguments.yaml").touch()
    before = sorted(workspace.rglob("*"))
    (first, shown), (second, also_shown) = run_ranks(2, outcome, ["--model-parallel-size", "2", *arguments], workspace)
    assert (first, second) == (2, 2)
    assert shown.count(message) == 1
    assert also_shown == ""
    assert sorted(workspace.rglob("*")) == before


def test_a_mistake_in_a_started_job_is_one_message(workspace):
    failed = run(
        *(sys.executable, PRETRAIN, "--model-parallel-size", "2", "--config", "tiny.yaml", "--data", "nowhere"),
        cwd=workspace,
    )
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert failed.stderr.count("error:") == 1
    assert "Traceback" not in failed.stderr


def test_a_world_that_does_not_divide(workspace, run_ranks):
    outcomes = run_ranks(3, outcome, ["--model-parallel-size", "2"], workspace)
    assert [code for code, _ in outcomes] == [2, 2, 2]
    assert "3 processes" in outcomes[0][1]
    assert "use tensor_parallel_size 1 or 3" in outcomes[0][1]
    assert outcomes[1][1] == outcomes[2][1] == ""
