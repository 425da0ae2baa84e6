"""Trains over two processes that share the device, over gloo, and compares their losses with those of one on the CPU.

    python benchmarks/gpu/shared_device.py --device cuda --json FILE

NCCL refuses two ranks on one GPU. TP=2, the replicas of DDP and those of ZeRO 1 take the same global batches, and their
losses have the tolerance of benchmarks/gpu/device_training.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from device_training import TOLERANCE, Comparison, options_of, started
from train_run import train

RUNS = {
    "TP=2, ZeRO 1": {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "zero_stage": 1},
    "TP=2, sequence parallel": {
        "env_type": "deepspeed+mpu",
        "model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "DDP, two replicas": {"env_type": "pytorchDDP"},
    "ZeRO 1, two replicas": {"env_type": "deepspeed", "zero_stage": 1},
}


def main() -> int:
    options = options_of(__doc__ or "")
    comparison = Comparison("Two processes on one device, over gloo", options.json)
    with tempfile.TemporaryDirectory() as name:
        folder, tiny = Path(name), options.tiny
        wanted = train(tiny, folder / "cpu", pytorch_device="cpu")
        for number, (title, arguments) in enumerate(list(RUNS.items())[: 1 if tiny else None]):

            def compare(run: str, number: int = number, arguments: dict = arguments) -> None:
                found = started(
                    tiny, folder / str(number), num_gpus=2, distributed_backend="gloo", **arguments
                )
                comparison.add(run, "CPU", found, wanted, TOLERANCE)

            comparison.attempt(title, compare)
    return int(comparison.wrong)


if __name__ == "__main__":
    sys.exit(main())
