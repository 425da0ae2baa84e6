"""Trains a small GPT-2 with dropout for some steps, in one process or as one of several ranks, and records its losses.

    python benchmarks/gpu/train_run.py --env-type deepspeed+mpu --model-parallel-size 2 --num-gpus 2 --losses FILE …

The trainer starts the other ranks itself. Several ranks share one GPU over gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from shardzoo.models import ParallelConfig, find_config, from_config
from shardzoo.trainer import Trainer
from shardzoo.trainer.logging.reporter import SilentReporter

VOCABULARY, FREQUENT, BATCH = 1000, 32, 8  # tokens, those that occur, samples in a step
MEDIUM = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}


class Samples:
    """An endless dataset of a few of the tokens, which a model soon learns; sample i is a function of i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, FREQUENT, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Losses(SilentReporter):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def training(self, step: int, values: dict[str, float]) -> None:
        self.by_step[step] = values["loss"]


def train(tiny: bool, folder: Path, **arguments: Any) -> dict[int, float]:
    """Trains in this process, and returns the loss of each step. `arguments` are those of the trainer."""
    replicas = arguments.get("num_gpus", 1) // arguments.get("model_parallel_size", 1)
    settings = {
        "lr": 1e-3, "log_interval": 1, "save_dir": str(folder), "micro_batch_size": BATCH // replicas, "tf32": False,
        "train_steps": 20, "seed": 1234, **arguments,
    }  # fmt: skip
    trainer, losses = Trainer(**settings), Losses()
    sizes = SMALL if tiny else MEDIUM
    config = find_config("gpt2").with_changes(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes
    )
    split = ParallelConfig(sequence_parallel=trainer.arguments.sequence_parallel)
    model = from_config(config, trainer.mesh, parallel_config=split)
    trainer.train(model, train_dataset=Samples(sizes["n_positions"]), reporter=losses)
    is_on_gpu = trainer.device.type == "cuda"
    for line in losses.notices:
        print(line, flush=True)
        if is_on_gpu and line.startswith("cuda_graph:"):
            raise RuntimeError(line)
    return losses.by_step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument(
        "--arguments", type=json.loads, required=True, help="the trainer's, as JSON"
    )
    options = parser.parse_args()
    losses = train(options.tiny, options.folder, **options.arguments)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        options.losses.write_text(json.dumps(losses) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
