"""Stops a rank by SIGSTOP in each phase of training, and measures whether and when the watchdog names it.

    python benchmarks/hung_ranks.py --tries 20

Each try trains a small GPT-2 on two ranks. It counts as named if the job ends with exit code 75, and a message names
rank 1, that it is stopped, and its stack. A data worker counts if its rank and its process are named. Launcher and
ranks are forked from a process that has imported everything.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from soak import PRELOADED, quietly, start_ranks_by_fork

STAGES = ("forward", "backward", "collective", "save", "evaluation", "worker")


def train(stage: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Trains; rank 1 stops itself once in the stage. Called in each rank.

    In the stage "killed" rank 1 is killed instead, again and again as long as there are two ranks.
    """
    import torch
    import torch.distributed as dist

    import shardzoo
    from shardzoo.trainer import Trainer
    from shardzoo.trainer.checkpointing import snapshot

    calls = collections.Counter[str]()

    def stop(at: str, call: int = 1) -> None:
        calls[at] += at == stage
        if calls[at] == call and stage == "killed" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls[at] == call and os.environ["RANK"] == "1" and not (folder / "stopped").exists():
            (folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    class Tokens(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            if torch.utils.data.get_worker_info() is not None:
                stop("worker", 5)
            ids = (torch.arange(16) + index) % 64
            return {"input_ids": ids, "labels": ids}

    class StoppingTrainer(Trainer):
        def forward_step(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
            stop("forward" if torch.is_grad_enabled() else "evaluation", 3)
            stop("killed", 7)
            return super().forward_step(data, model, mems)

    workers = {"num_workers": 1} if stage == "worker" else {}
    settings = {"train_steps": 6, "log_interval": 1, "save_interval": 2, "eval_interval": 3}
    trainer = StoppingTrainer(
        env_type="pytorchDDP",
        num_gpus=2,
        save_dir=str(folder / "run"),
        **settings,
        **workers,
        **arguments,
    )
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    model = shardzoo.from_config(shardzoo.models.family("gpt2").config(**sizes))
    if stage == "backward":
        next(model.parameters()).register_hook(lambda _: stop("backward", 3))
    group: Any = dist.distributed_c10d.ProcessGroup
    original = group.allreduce
    write: Any = snapshot._agree

    def all_reduce(*args: Any) -> Any:
        stop("collective", 12)
        return original(*args)

    def agree(*args: Any, **keywords: Any) -> Any:
        stop("save", 3)
        return write(*args, **keywords)

    if stage == "collective":
        group.allreduce = all_reduce
    snapshot._agree = agree
    trainer.train(model, train_dataset=Tokens(), valid_dataset=Tokens())


def launch(
    stage: str, folder: Path, faults: dict[str, Any], ranks: int = 2, **arguments: Any
) -> None:
    """The life of the launcher's process. `faults` are the fields of `Faults`."""
    from shardzoo.trainer.launch.agent import run_ranks
    from shardzoo.trainer.launch.failure import Faults

    def work() -> int:
        train(stage, folder, arguments)
        return 0

    multiprocessing.set_start_method(
        "fork", force=True
    )  # of data workers: this process has a forkserver's
    start_ranks_by_fork(folder, work, {})
    quietly(folder / "log", lambda: run_ranks(["rank"], ranks, Faults(**faults)), {})


def run_stage(stage: str, stall_timeout: float) -> tuple[float | None, str]:
    """Runs one job. Returns the seconds from the stop to its end, None if the rank was not named, and the messages."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = context.Process(
            target=launch, args=(stage, folder, {"stall_timeout": stall_timeout})
        )
        process.start()
        process.join(stall_timeout + 120)
        ended, messages = (
            time.time(),
            (folder / "log").read_text() if (folder / "log").exists() else "",
        )
        process.kill()
        process.join()
        if not is_named(stage, folder, process.exitcode, messages):
            return None, f"exit code {process.exitcode}\n{messages}"
        return ended - (folder / "stopped").stat().st_mtime, messages


def is_named(stage: str, folder: Path, code: int | None, messages: str) -> bool:
    """Returns whether the messages name the stopped rank or worker."""
    process = (folder / "stopped").read_text() if (folder / "stopped").exists() else "none"
    who = (
        f"rank 1 waits for its process {process}, "
        if stage == "worker"
        else "rank 1 is stopped by a signal"
    )
    where = {"worker": "'data'", "collective": "the collective all_reduce"}.get(stage, stage)
    return (
        code == 75
        and who in messages
        and where in messages
        and 'File "' in messages
        and "rank 0 " not in messages
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--stages", nargs="+", default=STAGES)
    parser.add_argument("--stall-timeout", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    chosen = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, "__main__"])
    stages = [stage for stage in chosen.stages for _ in range(chosen.tries)]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = list(pool.map(lambda stage: run_stage(stage, chosen.stall_timeout), stages))
    for stage in chosen.stages:
        report(
            stage, [result for name, result in zip(stages, results, strict=True) if name == stage]
        )
    return int(any(seconds is None for seconds, _ in results))


def report(stage: str, results: list[tuple[float | None, str]]) -> None:
    for seconds, messages in results:
        if seconds is None:
            print(f"{stage}: missed, {messages}", flush=True)
    named = [(seconds, messages) for seconds, messages in results if seconds is not None]
    phases = collections.Counter(
        messages.partition("in phase '")[2].partition("'")[0] for _, messages in named
    )
    spread = f"{min(named)[0]:.1f} to {max(named)[0]:.1f}" if named else "-"
    print(
        f"{stage}: named {len(named)} of {len(results)}, ended after {spread} s, {dict(phases)}",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        sys.exit(main())
