"""Ranks that stand still are named and end the job; a slow or long-preparing job is left alone."""

from __future__ import annotations

import hashlib
import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import warm_environment
from every_case import every_day

from shardzoo.models import family, from_config
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.launch import heartbeat
from shardzoo.trainer.launch.agent import run_ranks
from shardzoo.trainer.launch.failure import Faults
from shardzoo.trainer.launch.heartbeat import Sample, Sampler, refresh_sample
from shardzoo.trainer.launch.launch import find_smaller_jobs
from shardzoo.trainer.launch.phase import (
    OUTSIDE,
    SAVE,
    current_phase,
    phase,
    publish_phases,
    read_phase,
)
from shardzoo.trainer.launch.ranks import Ranks, from_json, on_first_rank, to_json
from shardzoo.trainer.launch.watchdog import STALLED, Stall, Watchdog

SCRIPT = Path(heartbeat.__file__).parents[2] / "benchmarks" / "hung_ranks.py"


class Clock:
    """A stand-in clock that only `sleep` moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Samples of ranks on a stand-in clock: each entry of `run` is what the ranks do for some seconds."""

    def __init__(self, timeout: float = 300.0) -> None:
        self.clock = Clock()
        self.watchdog = Watchdog(timeout, self.clock)
        self.number = 0
        self.samples: dict[int, Sample | None] = {}

    def run(
        self, seconds: float, *ranks: dict | None, stopped: tuple[int, ...] = (), busy: bool = False
    ) -> list[Stall]:
        """`ranks`: the fields of each rank's samples, None for a rank that takes none; busy: calls stay short."""
        for second in range(seconds):
            self.clock.now += 1.0
            self.number += 1
            for rank, fields in enumerate(ranks):
                if fields is not None and rank not in stopped:
                    idle = 0.1 if fields.get("busy", busy) else float(second)
                    kept = {name: value for name, value in fields.items() if name != "busy"}
                    self.samples[rank] = Sample(number=self.number, idle=idle, **kept)
                self.samples.setdefault(rank, None)
            stalls = self.watchdog.look(self.samples, lambda rank: rank in stopped)
            if stalls:
                return stalls
        return []


FORWARD, WAITS = {"phase": "forward"}, {"phase": "training step", "collective": "all_reduce"}


@pytest.mark.parametrize("phase", ["forward", "save", "evaluation", OUTSIDE, "work of rank 0"])
def test_a_stopped_rank_is_named_in_every_phase(phase):
    job = Job()
    assert not job.run(10, {"phase": phase}, {"phase": phase}, busy=True)
    stalls = job.run(400, WAITS, {"phase": phase}, stopped=(1,))
    assert [stall.rank for stall in stalls] == [1]
    assert 300 < stalls[0].seconds <= 302
    assert (
        stalls[0]
        .describe()
        .startswith(f"rank 1 is stopped by a signal (SIGSTOP) in phase {phase!r}")
    )


def test_a_rank_that_is_stopped_before_it_reports():
    (stall,) = Job().run(400, {"phase": OUTSIDE}, None, stopped=(1,))
    assert stall.describe().startswith(
        "rank 1 is stopped by a signal (SIGSTOP) before it reported anything"
    )


def test_the_rank_that_does_not_wait_is_the_cause():
    stalls = Job().run(400, WAITS, FORWARD, WAITS)
    assert [stall.rank for stall in stalls] == [1]
    assert "rank 1 stands still in phase 'forward'" in stalls[0].describe()


def test_collectives_that_do_not_match_name_all_ranks():
    stalls = Job().run(400, WAITS, {**WAITS, "collective": "broadcast"})
    assert [stall.sample.collective for stall in stalls] == ["all_reduce", "broadcast"]


def test_a_stopped_data_worker_is_named():
    stalls = Job().run(400, WAITS, {"phase": "data", "stopped": [4321]})
    assert [stall.rank for stall in stalls] == [1]
    assert "waits for its process 4321, which a signal has stopped" in stalls[0].describe()


def test_slow_steps_and_long_preparations_are_no_stall():
    job = Job()
    assert not job.run(
        600, {"phase": "work of rank 0"}, {"phase": "work of rank 0", "collective": "broadcast"}
    )
    assert not job.run(
        3600, {"phase": OUTSIDE}, WAITS
    )  # rank 0 builds kernels while rank 1 waits in its first step
    for _ in range(40):  # steps of nearly five minutes, each in one call
        assert not job.run(290, FORWARD, WAITS)
        assert not job.run(5, FORWARD, FORWARD, busy=True)
    assert not job.run(1200, {"phase": "save"}, {"phase": "save"})
    assert not job.run(
        3600, {**FORWARD, "busy": True}, {**WAITS, "busy": False}
    )  # rank 0 works on in short calls
    assert not Job(timeout=0).run(10_000, WAITS, FORWARD)


def test_a_job_that_was_suspended_as_a_whole_is_no_stall():
    job = Job()
    assert not job.run(10, FORWARD, WAITS, busy=True)
    job.clock.now += 3600
    # The launcher may look before a rank has taken its first sample again.
    assert not job.watchdog.look(job.samples, lambda rank: False)
    assert not job.run(200, FORWARD, WAITS)


def test_a_sampler_sees_each_new_call():
    """A loop whose calls take all of the time, at the same line: progress although every sample looks alike."""
    clock = Clock()
    sampler, samples = Sampler(clock), []

    def call() -> None:
        clock.now += 10
        samples.append(sampler.sample())

    for _ in range(5):
        call()
    assert [sample.idle for sample in samples] == [0.0] * 5
    assert samples[0].phase == OUTSIDE
    assert "sample" in samples[0].call


def test_a_long_native_call_that_computes_is_no_stall():
    """One call that computes for longer than a timeout, and one that waits, as a gloo collective does."""
    sampler, samples, ended = Sampler(), list[Sample](), threading.Event()

    def sample() -> None:
        while not ended.wait(0.05):
            samples.append(sampler.sample())

    def longest_idle(call: Callable[[], object]) -> float:
        """Returns the longest idle time, as a share of the call's."""
        samples.clear()
        started = time.monotonic()
        call()
        return max(found.idle for found in samples) / (time.monotonic() - started)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        assert longest_idle(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)) < 0.5
        assert longest_idle(lambda: time.sleep(1)) > 0.5
    finally:
        ended.set()
        thread.join()


def test_phase_and_stack_of_a_stopped_rank_say_where_it_is(tmp_path):
    """The phase is in a file, where it is read without the help of the process."""
    publish_phases(tmp_path / "phase")
    saves, ends = threading.Event(), threading.Event()

    def save() -> None:
        with phase(SAVE):
            saves.set()
            ends.wait()

    thread = threading.Thread(target=save)
    thread.start()
    saves.wait()
    with phase("training step"), phase("evaluation"):
        published = read_phase(tmp_path / "phase")
    ends.set()
    thread.join()
    assert read_phase(tmp_path / "phase") == OUTSIDE

    stack = """Thread 0x1 (most recent call first):
  File "/a/shardzoo/trainer/checkpointing/snapshot.py", line 3 in write_snapshot

Thread 0x2 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/v/torch/distributed/c10d_logger.py", line 3 in wrapper
  File "/a/shardzoo/trainer/launch/ranks.py", line 30 in sum
  File "/a/shardzoo/trainer/evaluation.py", line 90 in evaluate
  File "/a/shardzoo/trainer/loop.py", line 9 in run
"""
    found = refresh_sample(Sample(phase="forward"), published, stack)
    assert found.phase == "evaluation, during a save"
    assert found.collective == "all_reduce"
    assert found.call == "sum (/a/shardzoo/trainer/launch/ranks.py:30)"


def test_phases_nest_and_belong_to_their_thread():
    @phase("evaluation")
    def evaluate() -> str:
        with phase("data"):
            assert current_phase() == "data"
        return current_phase()

    assert [evaluate(), evaluate()] == ["evaluation"] * 2
    with pytest.raises(KeyError), phase("forward"):
        raise KeyError
    seen: list[str] = []

    def work_beside() -> None:
        with phase("forward"):
            seen.append(current_phase())

    thread = threading.Thread(target=work_beside)
    thread.start()
    thread.join()
    assert seen == [OUTSIDE]  # of the main thread
    assert current_phase() == OUTSIDE


def test_training_states_its_phases(tmp_path):
    """Also that of reading data, in a checkout as in an installed package."""
    seen: set[tuple[str, str]] = set()

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            seen.add(("sample", current_phase()))
            return {"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index}

    class WatchedTrainer(Trainer):
        def forward_step(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
            seen.add(("forward pass", current_phase()))
            return super().forward_step(data, model, mems)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.add(("update", current_phase()))
            return super().step(closure)

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = from_config(family("gpt2").config(**sizes, bos_token_id=1, eos_token_id=2))
    next(model.parameters()).register_hook(lambda gradient: seen.add(("gradient", current_phase())))
    trainer = WatchedTrainer(env_type="pytorch", train_steps=2, save_dir=str(tmp_path))
    optimizer = Optimizer(model.parameters(), 0.1)
    trainer.train(model, optimizer, train_dataset=Samples(), valid_dataset=Samples())
    assert {(event, name.removesuffix(", during a save")) for event, name in seen} == {
        ("sample", "data"),
        ("sample", "evaluation"),
        ("forward pass", "forward"),
        ("forward pass", "evaluation"),
        ("gradient", "backward"),
        ("update", "optimizer step"),
    }


def test_a_compiler_and_a_debugger_may_take_their_time():
    """They are no code of ours, so their modules on the stack stand for a phase."""

    def sample_in(module: str) -> Sample:
        scope = {"__name__": module, "sampler": Sampler()}
        with phase("forward"):
            exec("def call():\n    return sampler.sample()\nfound = call()", scope)
        return scope["found"]

    assert sample_in("pdb").phase == "debugger"
    assert sample_in("torch._inductor.compile_fx").phase == "building kernels"
    assert sample_in("pdb").is_long
    assert sample_in("torch._inductor.output_code").phase == "forward"  # it runs what was compiled
    assert not sample_in("torch._inductor.output_code").is_long


def run(stage: str, folder: Path, *launcher: str, **arguments) -> tuple[int, str]:
    folder.mkdir()
    command = [
        "python",
        *launcher,
        str(SCRIPT),
        "--train",
        stage,
        str(folder),
        json.dumps(arguments),
    ]
    done = subprocess.run(
        command, env=warm_environment(), capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stderr


@pytest.mark.before_release
def test_a_restarted_job_equals_an_undisturbed_one(tmp_path):
    code, messages = run("collective", tmp_path / "stopped", stall_timeout=2, max_restarts=1)
    assert code == 0, messages
    assert "rank 1 is stopped by a signal (SIGSTOP) in phase" in messages
    assert "in the collective all_reduce" in messages
    assert 'ranks.py", line' in messages  # its stack
    assert f"restart 1 of 1 (exit code {STALLED})" in messages
    assert run("none", tmp_path / "whole")[0] == 0
    last = [
        tmp_path / name / "run" / "checkpoints" / "step-000006" for name in ("stopped", "whole")
    ]
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in last]
    assert files[0] == files[1]


@pytest.mark.parametrize(("devices", "left"), [(None, "0,2"), ("7,GPU-b,5", "7,5")])
def test_a_rank_that_fails_twice_is_left_out(tmp_path, monkeypatch, capfd, devices, left):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
os.write(1, f"{rank} {size} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n".encode())  # in one piece
if size == "3" and rank == "1" or size == "2" and not os.path.exists("once"):
    open("once", "w")
    os.kill(os.getpid(), signal.SIGKILL)
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert run_ranks([sys.executable, str(script)], 3, Faults(max_restarts=2, smaller=(2, 1))) == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()[-2:]) == [f"0 2 {left}", f"1 2 {left}"]
    assert "restart 1 of 2 (exit code 137)\n" in shown.err
    assert (
        "restart 2 of 2 (exit code 137) with 2 instead of 3 processes, because rank 1 has failed twice\n"
        in shown.err
    )


def test_the_smaller_sizes_of_a_job():
    layout = {
        "num_gpus": 8,
        "model_parallel_size": 2,
        "env_type": "deepspeed+mpu",
        "micro_batch_size": 3,
    }
    assert find_smaller_jobs(TrainingArguments(**layout, global_batch_size=36)) == (6, 4, 2)
    assert find_smaller_jobs(TrainingArguments(**layout, global_batch_size=24)) == (4, 2)
    assert (
        find_smaller_jobs(TrainingArguments(**layout)) == ()
    )  # the global batch follows from the number of ranks
    assert find_smaller_jobs(TrainingArguments(env_type="pytorch", global_batch_size=4)) == ()


@pytest.mark.before_release
def test_a_job_goes_on_with_fewer_ranks(tmp_path, fork_server, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    launch = importlib.import_module("hung_ranks").launch
    losses, log = [], ""
    for stage, ranks in (("none", 1), ("killed", 2)):
        folder = tmp_path / stage
        folder.mkdir()
        faults = {"max_restarts": 2, "smaller": (1,)}
        batch = {"micro_batch_size": 1, "global_batch_size": 4}
        process = fork_server.Process(
            target=launch, args=(stage, folder, faults, ranks), kwargs=batch
        )
        process.start()
        process.join(120)
        log = (folder / "log").read_text()
        assert process.exitcode == 0, log
        records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        losses.append(
            {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
        )
    assert "with 1 instead of 2 processes, because rank 1 has failed twice" in log
    assert sorted(losses[1]) == list(range(1, 7))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.before_release
def test_ranks_of_another_launcher_notice_a_stopped_one(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, messages = run("forward", tmp_path / "run", *launcher, stall_timeout=2)
    assert code != 0
    assert "rank 1 is stopped by a signal (SIGSTOP)" in messages
    assert f"exitcode  : {STALLED}" in messages


@pytest.mark.parametrize(
    ("cause", "number"),
    every_day(
        [("stopped", signal.SIGTERM)],
        more=[("stuck", signal.SIGINT), ("stopped", signal.SIGINT), ("stuck", signal.SIGTERM)],
    ),
)
def test_a_signal_ends_a_job_that_cannot_save(tmp_path, number, cause):
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, signal, time
from shardzoo.trainer.launch.launch import ensure_processes
from shardzoo.trainer.launch.failure import Faults
launch = ensure_processes(2, faults=Faults(grace_period={600 if cause == "stopped" else 1}))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"ready{{launch.rank}}", "w")
if launch.rank == 1 and {cause!r} == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
""")
    command = ["python", "script.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=warm_environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        while not (tmp_path / "ready0").exists() or not (tmp_path / "ready1").exists():
            assert process.poll() is None
            time.sleep(0.05)
        started = time.monotonic()
        process.send_signal(number)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert time.monotonic() - started < 30
    expected = (
        "rank 1 is stopped by a signal, so the job cannot save"
        if cause == "stopped"
        else "within --grace-period 1 s"
    )
    assert expected in messages


def test_messages_between_ranks_are_plain(run_mesh):
    values = [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "ä\x1b",
        [1, (2, "x")],
        {1: ("a", None), "b": []},
        Path("/a/b"),
        (),
    ]
    for value in values:
        assert from_json(to_json(value)) == value
        assert type(from_json(to_json(value))) is type(value)
    assert isinstance(
        from_json(to_json(FileNotFoundError(2, "No such file", "x"))), FileNotFoundError
    )
    with pytest.raises(TypeError, match="a Stall cannot be sent between ranks"):
        to_json(Stall(0, None, 0.0, is_stopped=True))

    def exchange(mesh) -> tuple[list, object, str]:
        ranks = Ranks(mesh)
        gathered = ranks.gather(("x" * ranks.rank, {ranks.rank: None}))

        def fail() -> None:
            raise ValueError("of rank 0")

        with pytest.raises(ValueError, match="of rank 0"):
            on_first_rank(fail)
        return gathered, on_first_rank(lambda: ("a", Path("b"))), str(on_first_rank(lambda: None))

    expected = [("x" * rank, {rank: None}) for rank in range(3)]
    assert run_mesh(1, exchange, data=3) == [(expected, ("a", Path("b")), "None")] * 3


@pytest.mark.before_release
def test_ranks_wait_for_rank_0_for_longer_than_for_a_collective(run_ranks):
    def waits() -> str:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
        return on_first_rank(lambda: time.sleep(3) or "prepared")

    assert run_ranks(2, waits, isolated=True) == ["prepared"] * 2


@pytest.mark.parametrize(
    "name", ["stall_timeout", "collective_timeout", "grace_period", "max_restarts"]
)
def test_times_are_checked(name):
    with pytest.raises(ValueError, match=name):
        TrainingArguments(**{name: -1})
