"""A small run, whose folder may be in an object store."""

from __future__ import annotations

import os

import torch
from torch import nn

from shardzoo.trainer import Trainer


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 3)

    def forward(self, values, labels):
        return {"loss": (self.inner(values).sum(-1) - labels).square().mean()}


def samples():
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "values": torch.randn(4, generator=generator),
            "labels": torch.randn((), generator=generator),
        }
        for _ in range(16)
    ]


def train(save_dir, steps: int, **options):
    trainer = Trainer(
        env_type="pytorch",
        save_dir=str(save_dir),
        train_steps=steps,
        micro_batch_size=4,
        save_interval=2,
        log_interval=1,
        lr=0.05,
        lr_schedule="constant",
        report_to="none",
        **options,
    )
    model = Regression()
    trainer.train(model, train_dataset=samples())
    return model


def train_in_process(variables: dict[str, str], save_dir: str, steps: int) -> None:
    """Trains in a new process with the given environment, and resumes what is there."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    train(save_dir, steps, resume=True, save_total_limit=2)


def convert_in_process(
    variables: dict[str, str], source: str, destination: str, resume: bool
) -> None:
    """Splits a model over four ranks in a new process."""
    from shardzoo.convert.operations import Options, split

    os.environ.update(variables)
    split(source, destination, 4, Options(resume=resume, jobs=2))
