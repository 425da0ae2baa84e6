"""Breaks training, conversion and preparation at random moments, and compares what they make with undisturbed runs.

    python benchmarks/soak.py [--training 400] [--conversion 400] [--preparation 200] [--seconds 3600] [--seed 0]

A fault is one of: SIGKILL of any process (the launcher, a rank, a worker), SIGSTOP of a rank, SIGTERM, SIGINT, a full
disk (RLIMIT_FSIZE), a removed file, a flipped bit, a slow disk together with a SIGKILL. After some faults in a row the
work goes on to its end. Then losses and files must be those of the undisturbed run, bit for bit. Each fault must end
the work within 15 seconds (after a SIGSTOP, of the stall timeout), with a documented exit code and no traceback, and
leave no process. Training runs under the package's own launcher. Processes are forked from one that has imported
everything, so a round costs little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

PRELOADED = [
    "shardzoo.trainer.engines.deepspeed_engine", "shardzoo.trainer.engines.pipeline_engine",
    "shardzoo.trainer.engines.ddp_engine", "shardzoo.trainer.trainer", "shardzoo.convert.operations",
    "shardzoo.cli.convert", "shardzoo.cli.data", "shardzoo.cli.rank_errors", "torch.utils.tensorboard",
    "torch._dynamo", "shardzoo.models.gpt2", "transformers.models.gpt2.modeling_gpt2",
]  # fmt: skip
SECONDS_TO_END = 15.0
STALL_TIMEOUT = 3.0  # of a job with a stopped rank
STEPS = 12
IN_A_ROW = 5  # at most so many faults before the work goes on to its end
START_AGAIN = ("no undamaged checkpoint", "start again")  # what a damaged file may ask for
SIGNALS = {
    "SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT,
    "slow disk": signal.SIGKILL,
}  # fmt: skip
STALLED = 75  # the exit code of a job that stood still
# Success, a user's error or a disk's, a stop by a signal, and the signals' own codes.
EXIT_CODES = {0, 2, 130, 143, 137, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}

TRAINING: dict[str, tuple[int, dict[str, Any]]] = {
    "torch": (1, {"env_type": "pytorch"}),
    "DDP": (2, {"env_type": "pytorchDDP"}),
    "DeepSpeed": (2, {"env_type": "deepspeed", "zero_stage": 2}),
    "TP=2": (2, {"env_type": "deepspeed+mpu", "model_parallel_size": 2}),
    "TP=2 x DP=2": (4, {"env_type": "deepspeed+mpu", "model_parallel_size": 2}),
    "PP=2": (2, {"env_type": "deepspeed+mpu", "pipeline_parallel_size": 2}),
}
CONVERSION = ("split", "reshard", "merge")
PREPARATION = ("1 worker", "2 workers")


@dataclass
class Job:
    """One kind of work: how a process does it, and what it makes."""

    group: str
    name: str
    folder: Path
    begin: Callable[[Job, dict[str, Any]], Any]
    made: Callable[[Path], dict[str, bytes]]
    faults: tuple[str, ...]
    expected: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 1.0
    source: Path = Path()

    @property
    def output(self) -> Path:
        return self.folder / "output"


# What runs in the forked processes


def quietly(log: Path, work: Callable[[], int], spec: dict[str, Any]) -> None:
    """Runs `work` with its output in a file, on the disk that `spec` describes, and ends with its exit code."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    note_pid(log.parent, os.getpid())
    if spec.get("limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec["limit"], spec["limit"]))
    if spec.get("slow"):
        flush = os.fsync
        os.fsync = lambda descriptor: (time.sleep(0.05), flush(descriptor))[1]
    code = 1
    try:
        code = work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*cast(Any, sys.exc_info()))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def note_pid(folder: Path, pid: int) -> None:
    with (folder / "pids").open("a") as pids:
        pids.write(f"{pid}\n")


class ForkedRank:
    """Stands in for `subprocess.Popen` in the launcher: the rank is forked instead of started.

    Args:
        folder: Gets its log.
        work: Runs in the rank, and returns its exit code.
        spec: Describes its disk.
        env: Its environment.
    """

    def __init__(
        self, folder: Path, work: Callable[[], int], spec: dict[str, Any], env: dict[str, str]
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.environ.clear()
            os.environ.update(env)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            own = {
                **spec,
                "limit": spec.get("limit") if int(env["RANK"]) == spec.get("rank", 0) else None,
            }
            quietly(folder / "log", work, own)
        note_pid(folder, self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 60)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 60)
            time.sleep(0.005)
        return self.returncode or 0


def start_ranks_by_fork(folder: Path, work: Callable[[], int], spec: dict[str, Any]) -> None:
    """Lets the elastic agent of this process fork its ranks, which then do `work`, instead of starting a command."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    popen: Any = lambda *_, env, **__: ForkedRank(folder, work, spec, env)  # noqa: E731
    subprocess_handler.Popen = popen


def launch(job: Job, spec: dict[str, Any]) -> None:
    """The life of the launcher's process."""
    from shardzoo.trainer.launch.agent import run_ranks
    from shardzoo.trainer.launch.failure import Faults

    ranks, _ = TRAINING[job.name]
    if ranks == 1:
        os.environ.pop("RANK", None)
        quietly(job.folder / "log", lambda: train(job), spec)
    start_ranks_by_fork(job.folder, lambda: train(job), spec)
    faults = Faults(stall_timeout=spec.get("stall", 300.0))
    quietly(job.folder / "log", lambda: run_ranks(["rank"], ranks, faults), {})


class Samples:
    """Sample i is a function of i."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if index >= len(self):
            raise IndexError
        ids = torch.randint(0, 60, (8 + index % 5,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def train(job: Job) -> int:
    """Trains a tiny GPT-2 as one rank, and appends each loss to `losses`."""
    import torch

    from shardzoo.cli.rank_errors import run_and_report_once
    from shardzoo.models import from_config
    from shardzoo.trainer import Trainer, TrainingArguments
    from shardzoo.trainer.launch.rank_info import RankInfo
    from shardzoo.trainer.logging.reporter import SilentReporter

    torch.set_num_threads(1)
    info = RankInfo.from_environment()

    class Losses(SilentReporter):
        def training(self, step: int, values: dict[str, float]) -> None:
            if info.is_first:
                with (job.folder / "losses").open("a") as file:
                    file.write(json.dumps([step, values["loss"]]) + "\n")

    def work() -> int:
        settings = {
            "micro_batch_size": 2, "global_batch_size": 8, "train_steps": STEPS, "log_interval": 1, "lr": 1e-2,
            "save_interval": 1, "save_total_limit": 3, "resume": True, "save_dir": str(job.output),
        }  # fmt: skip
        trainer = Trainer(TrainingArguments(**settings, **TRAINING[job.name][1]))
        sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 64}
        model = from_config({"model_type": "gpt2", **sizes}, trainer.mesh).train()
        trainer.train(model, train_dataset=Samples(), reporter=Losses(), extra_files=job.source)
        return 0

    return run_and_report_once(work, info)


def command(job: Job, spec: dict[str, Any]) -> None:
    """Runs a conversion or a preparation as its command does, in small pieces, so that there is something to break."""
    from shardzoo.cli.main import main
    from shardzoo.convert import workers
    from shardzoo.data.text import prepare, sources

    workers.MEMORY, sources.CHUNK_BYTES, prepare.SECONDS_BETWEEN_COMMITS = 1 << 18, 8192, -1.0
    if job.group == "preparation":
        paths = [
            "--input",
            str(job.source / "text.jsonl"),
            "--output",
            str(job.output),
            "--tokenizer",
            str(job.source),
        ]
        words = ["data", "prepare", *paths, "--workers", job.name[0]]
    else:
        destination = job.output
        ranks = [] if job.name == "merge" else ["--tp", "4"]
        words = ["convert", job.name, str(job.source), str(destination), *ranks, "--jobs", "2"]
        words += ["--resume"] * (not spec.get("first"))
    quietly(job.folder / "log", lambda: main(words), spec)


# What breaks them


@dataclass
class Soak:
    folder: Path
    chosen: random.Random
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: dict[tuple[str, str], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, "__main__"])

    def start(self, job: Job, spec: dict[str, Any]) -> Any:
        for name in ("log", "pids"):
            (job.folder / name).unlink(missing_ok=True)
        process = self._context.Process(target=job.begin, args=(job, spec))
        process.start()
        return process

    def undisturbed(self, job: Job) -> None:
        started = time.monotonic()
        process = self.start(job, {"first": True})
        process.join()
        job.seconds = time.monotonic() - started
        if process.exitcode != 0:
            raise SystemExit(
                f"{job.name} fails without a fault:\n{(job.folder / 'log').read_text()}"
            )
        job.expected = job.made(job.folder)
        clear(job)

    def round(self, job: Job, most: int) -> int:
        """Breaks one piece of work at most `most` times, ends it, and compares. Returns the number of faults."""
        faults, before = 0, tree(job.source)
        for attempt in range(min(most, self.chosen.randint(1, IN_A_ROW))):
            kind = self.chosen.choice(job.faults)
            if not self.fault(job, kind, first=attempt == 0):
                break  # it was done before the fault
            faults += 1
        for attempt in range(2):
            process = self.start(job, {"first": False})
            self.expect_end(job, process, "the end", time.monotonic() + 20 * SECONDS_TO_END)
            log = (job.folder / "log").read_text()
            if process.exitcode == 0:
                break  # a removed file can mean that nothing is left to go on from
            if attempt == 0 and any(words in log for words in START_AGAIN):
                clear(job)
            else:
                self.problem(job, "the end", f"exit code {process.exitcode}: {log[-8000:]}")
        made = job.made(job.folder)
        if made != job.expected:
            names = sorted(n for n in {*made, *job.expected} if made.get(n) != job.expected.get(n))
            self.problem(job, "the end", f"differs in {', '.join(names[:5])}")
        if tree(job.source) != before:
            self.problem(job, "the end", "the source has changed")
        clear(job)
        return faults

    def fault(self, job: Job, kind: str, *, first: bool) -> bool:
        """Injects one fault and waits for the end. Returns False if the work was done before."""
        spec: dict[str, Any] = {"first": first, "slow": kind == "slow disk"}
        if kind == "SIGSTOP":
            spec["stall"] = STALL_TIMEOUT
        if kind in ("removed file", "flipped bit") and not self.damage(job, kind):
            kind = "SIGKILL"
        if kind == "full disk":
            spec["limit"] = int(2 ** self.chosen.uniform(8, 18))
            spec["rank"] = (
                self.chosen.randrange(TRAINING[job.name][0]) if job.name in TRAINING else 0
            )
        process, started = self.start(job, spec), time.monotonic()
        moment = started + self.chosen.uniform(0.05, 0.9) * job.seconds
        if kind in SIGNALS:
            while process.is_alive() and time.monotonic() < moment:
                time.sleep(0.001)
            if not process.is_alive():
                self.expect_end(job, process, kind, started)
                return False
            self.send(job, process, SIGNALS[kind])
            started = time.monotonic() + spec.get("stall", 0.0)
        self.expect_end(
            job, process, kind, started if kind in SIGNALS else started + 4 * job.seconds
        )
        key = job.group, kind
        self.done[key] += 1
        self.slowest[key] = max(self.slowest.get(key, 0.0), time.monotonic() - started)
        return True

    def send(self, job: Job, process: Any, number: int) -> None:
        """SIGKILL goes to any process of the job, SIGSTOP to a rank, and others to the process that a user sees."""
        pids, children = [process.pid], Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if number == signal.SIGKILL:
            with contextlib.suppress(OSError):
                pids += [int(line) for line in (job.folder / "pids").read_text().split()]
            with contextlib.suppress(OSError):
                pids += map(int, children.read_text().split())
        while number == signal.SIGSTOP and process.is_alive():
            with contextlib.suppress(OSError):
                if pids := list(map(int, children.read_text().split())):
                    break
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.chosen.choice(sorted(set(pids))), number)

    def damage(self, job: Job, kind: str) -> bool:
        """Removes a file of what is written so far, or flips a bit of it."""
        unfinished = [
            *job.folder.glob(".output.partial/*.partial"),
            *job.folder.glob("output.*partial*"),
        ]
        files = [
            path for path in (*unfinished, *job.output.glob("checkpoints/*/*")) if path.is_file()
        ]
        if not files:
            return False
        path = self.chosen.choice(sorted(files))
        if kind == "removed file":
            path.unlink()
            return True
        content = bytearray(path.read_bytes())
        if not content:
            return False
        content[self.chosen.randrange(len(content))] ^= 1 << self.chosen.randrange(8)
        path.write_bytes(bytes(content))
        return True

    def expect_end(self, job: Job, process: Any, kind: str, since: float) -> None:
        """Waits until the processes have ended, and notes what they should not have done."""
        process.join(max(0.1, since + SECONDS_TO_END - time.monotonic()))
        if process.is_alive():
            self.problem(job, kind, f"still runs after {SECONDS_TO_END:g} s")
            process.kill()
        process.join()
        deadline = time.monotonic() + 5
        while (left := alive(job.folder / "pids")) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(OSError):
                told = Path(f"/proc/{pid}/status").read_text()[:200]
                self.problem(job, kind, f"process {pid} is left: {' '.join(told.split())}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        log = (
            (job.folder / "log").read_text(errors="replace")
            if (job.folder / "log").exists()
            else ""
        )
        if "Traceback" in log:
            self.problem(job, kind, f"traceback:\n{log[-8000:]}")
        elif process.exitcode not in EXIT_CODES and (process.exitcode, kind) != (
            STALLED,
            "SIGSTOP",
        ):
            self.problem(job, kind, f"exit code {process.exitcode}: {log[-8000:]}")

    def problem(self, job: Job, kind: str, text: str) -> None:
        self.problems.append(f"{job.group}, {job.name}, {kind}: {text}")
        print(f"PROBLEM {self.problems[-1]}", flush=True)


def alive(pids: Path) -> list[int]:
    found = []
    for line in pids.read_text().split() if pids.exists() else []:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{line}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(line))
    return found


def clear(job: Job) -> None:
    for path in job.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def made_by_training(folder: Path) -> dict[str, bytes]:
    """Each step's loss, also of the steps that were done again, and the last checkpoint."""
    losses = (
        sorted(set((folder / "losses").read_text().splitlines()))
        if (folder / "losses").exists()
        else []
    )
    found = tree(folder / f"output/checkpoints/step-{STEPS:06d}")
    left = [str(path.relative_to(folder)) for path in folder.glob("output/checkpoints/.*")]
    left += [path.name for path in folder.glob("output/.run.lock")]
    return {**found, "losses": "\n".join(losses).encode(), "left": "\n".join(left).encode()}


def made_files(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(folder).items() if name not in ("log", "pids")}


# What is broken


def jobs(folder: Path) -> Iterator[Job]:
    """Yields the work of the three groups. Their sources are made first."""
    from shardzoo.convert import Options, split
    from shardzoo.data.tokenizers.training import train_byte_level_bpe

    source = folder / "text"
    source.mkdir()
    chosen = random.Random(0)
    words = ["".join(chosen.choices("abcdefgh", k=chosen.randint(2, 8))) for _ in range(300)]
    texts = [" ".join(chosen.choices(words, k=60)) for _ in range(250)]
    train_byte_level_bpe(texts[:50], 300, source)
    (source / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = folder / "tokenizer"
    shutil.copytree(source, tokenizer, ignore=shutil.ignore_patterns("*.jsonl"))
    whole = folder / "whole"
    make_model(whole)
    split(whole, folder / "two", 2, Options())
    kinds = ("SIGKILL", "SIGTERM", "full disk", "removed file", "flipped bit", "slow disk")
    for name, (ranks, _) in TRAINING.items():
        own = (*kinds, "SIGSTOP") if ranks > 1 else kinds  # one process is not watched
        yield make_job(folder, "training", name, launch, made_by_training, own, tokenizer)
    for name in CONVERSION:
        origin = whole if name == "split" else folder / "two"
        yield make_job(folder, "conversion", name, command, made_files, (*kinds, "SIGINT"), origin)
    kinds = ("SIGKILL", "SIGTERM", "SIGINT", "full disk", "removed file", "slow disk")
    for name in PREPARATION:
        yield make_job(folder, "preparation", name, command, made_files, kinds, source)


def make_job(
    folder: Path,
    group: str,
    name: str,
    begin: Any,
    made: Any,
    faults: tuple[str, ...],
    source: Path,
) -> Job:
    own = folder / f"{group} {name}".replace(" ", "-").replace("=", "")
    own.mkdir()
    return Job(group, name, own, begin, made, faults, source=source)


def make_model(folder: Path) -> None:
    """Writes a GPT-2 of two megabytes as transformers does."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_head=8, n_layer=8, n_positions=32, vocab_size=2000)
    GPT2LMHeadModel(config).save_pretrained(folder)


def soak(
    goals: dict[str, int],
    seconds: float,
    seed: int,
    folder: Path,
    report: Path | None,
    names: Sequence[str],
) -> Soak:
    """Injects faults until each group has its goal, or the time is over. `names` are those of jobs; none is all."""
    found, started = Soak(folder, random.Random(seed)), time.monotonic()
    by_group: dict[str, list[Job]] = {}
    for job in jobs(folder):
        if goals.get(job.group) and (not names or job.name in names):
            found.undisturbed(job)
            by_group.setdefault(job.group, []).append(job)
            print(f"{job.group}, {job.name}: {job.seconds:.2f} s undisturbed", flush=True)
    reached, turn = Counter[str](), 0
    while time.monotonic() - started < seconds and any(
        reached[group] < goals[group] for group in by_group
    ):
        # The group that is furthest from its goal is next, and its jobs in turn.
        group = min(by_group, key=lambda name: reached[name] / goals[name])
        job = by_group[group][turn % len(by_group[group])]
        turn += 1
        try:
            reached[group] += found.round(job, goals[group] - reached[group])
        except Exception:
            found.problem(job, "the soak itself", traceback.format_exc())
            clear(job)
        passed = ", ".join(f"{reached[name]} of {goals[name]} {name}" for name in by_group)
        print(
            f"{time.monotonic() - started:.0f} s: {passed}; {len(found.problems)} problems",
            flush=True,
        )
        if report is not None:
            report.write_text(json.dumps(summary(found), indent=1) + "\n")
    return found


def summary(found: Soak) -> dict[str, Any]:
    rows = [
        {
            "group": group,
            "fault": kind,
            "count": count,
            "slowest_seconds": round(found.slowest[group, kind], 2),
        }
        for (group, kind), count in sorted(found.done.items())
    ]
    return {"faults": sum(found.done.values()), "rows": rows, "problems": found.problems}


def table(found: Soak) -> str:
    lines = [f"{'work':<12} {'fault':<13} {'count':>6} {'slowest end':>12}"]
    for (group, kind), count in sorted(found.done.items()):
        lines.append(f"{group:<12} {kind:<13} {count:>6} {found.slowest[group, kind]:>10.1f} s")
    return "\n".join([*lines, f"{sum(found.done.values())} faults, {len(found.problems)} problems"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for group, goal in (("training", 400), ("conversion", 400), ("preparation", 200)):
        parser.add_argument(f"--{group}", type=int, default=goal, help="number of faults")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    parser.add_argument("--report", type=Path, help="a JSON file for the table")
    parser.add_argument(
        "--jobs",
        nargs="*",
        default=[],
        help=f"of {', '.join((*TRAINING, *CONVERSION, *PREPARATION))}",
    )
    given = parser.parse_args()
    goals = {group: getattr(given, group) for group in ("training", "conversion", "preparation")}
    with tempfile.TemporaryDirectory(prefix="shardzoo-soak-", dir=given.folder) as folder:
        found = soak(goals, given.seconds, given.seed, Path(folder), given.report, given.jobs)
    print(table(found))
    for problem in found.problems:
        print(problem.splitlines()[0])
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
