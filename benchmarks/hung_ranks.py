"""Stops a rank by SIGSTOP in each phase of training, and measures whether and when the watchdog names it.

    python benchmarks/hung_ranks.py --tries 20

Each try trains a small GPT-2 on two ranks. It counts as named if the job ends with exit code 75, and a message names
rank 1, that it is stopped, and its stack. A data worker counts if its rank and its process are named.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = ("forward", "backward", "collective", "save", "evaluation", "worker")


def train(stage: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Trains; rank 1 stops itself once in the stage. Called in each rank."""
    import torch
    import torch.distributed as dist

    import shardzoo
    from shardzoo.trainer import Trainer
    from shardzoo.trainer.checkpointing import snapshot

    calls = collections.Counter[str]()

    def stop(at: str, call: int = 1) -> None:
        calls[at] += at == stage
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
            return super().forward_step(data, model, mems)

    workers = {"num_workers": 1} if stage == "worker" else {}
    settings = {"train_steps": 6, "batch_size": 2, "log_interval": 1, "save_interval": 2, "eval_interval": 3}
    trainer = StoppingTrainer(
        env_type="pytorchDDP", num_gpus=2, save_dir=str(folder / "run"), **settings, **workers, **arguments
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


def run_stage(stage: str, folder: Path, *launcher: str, **arguments: Any) -> tuple[int, str, float]:
    """Runs one job; returns its exit code, its messages, and the seconds from the stop to its end."""
    command = [*(launcher or (sys.executable,)), __file__, "--train", stage, str(folder), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    stopped = folder / "stopped"
    return done.returncode, done.stderr, time.time() - stopped.stat().st_mtime if stopped.exists() else 0.0


def is_named(stage: str, folder: Path, code: int, messages: str) -> bool:
    """Returns whether the messages name the stopped rank or worker."""
    process = (folder / "stopped").read_text() if (folder / "stopped").exists() else "none"
    who = f"rank 1 waits for its process {process}, " if stage == "worker" else "rank 1 is stopped by a signal"
    where = {"worker": "'data'", "collective": "the collective all_reduce"}.get(stage, stage)
    return code == 75 and who in messages and where in messages and 'File "' in messages and "rank 0 " not in messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--stages", nargs="+", default=STAGES)
    parser.add_argument("--stall-timeout", type=float, default=3.0)
    chosen = parser.parse_args()
    missed = 0
    for stage in chosen.stages:
        seconds, phases = list[float](), collections.Counter[str]()
        for _ in range(chosen.tries):
            with tempfile.TemporaryDirectory() as name:
                code, messages, took = run_stage(stage, Path(name), stall_timeout=chosen.stall_timeout)
                if is_named(stage, Path(name), code, messages):
                    seconds.append(took)
                    phases[messages.partition("in phase '")[2].partition("'")[0]] += 1
                else:
                    print(f"{stage}: missed, exit code {code}\n{messages}", flush=True)
        missed += chosen.tries - len(seconds)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-"
        print(f"{stage}: named {len(seconds)} of {chosen.tries}, ended after {spread} s, {dict(phases)}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        sys.exit(main())
