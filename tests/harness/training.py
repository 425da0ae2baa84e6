"""What tests of the trainer share: tiny models, samples of unequal lengths, and runs that give back their losses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from every_case import EVERY_CASE
from tiny_models import hf_model, tiny


class Pairs:
    """Sample i is a function of i: a few tokens, and the same ones backwards, some of them ignored."""

    def __init__(self, size: int = 64, vocab_size: int = 60) -> None:
        self.size, self.vocab_size = size, vocab_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 11, (1,), generator=generator))
        ids = torch.randint(2, self.vocab_size, (length,), generator=generator)
        labels = ids.flip(0)
        labels[: index % 3] = -100
        return {"input_ids": ids, "labels": labels}


class Stream:
    """The same samples, to be read from the beginning only."""

    def __init__(self, samples: Pairs) -> None:
        self.samples = samples

    def __iter__(self):
        return (self.samples[i] for i in range(len(self.samples)))


SIZES: dict[str, Any] = {"vocab_size": 64, "d_ff": 64, "layers": 2}


def tiny_t5(dropout: float = 0.0) -> Any:
    """transformers' T5 with random weights, the same at each call."""
    return hf_model("T5ForConditionalGeneration", dropout, **SIZES).train()


def native_t5(mesh: Any, **sizes: int) -> Any:
    """The zoo's, with T5's dropout of 0.1."""
    from shardzoo.models import from_config

    return from_config(tiny("t5", **{**SIZES, **sizes}), mesh).train()


def native_mixture(mesh: Any) -> Any:
    """The zoo's Mixtral of five experts, with dropout and the auxiliary loss."""
    from shardzoo.models import from_config

    return from_config(tiny("mixtral", 0.1, vocab_size=64, output_router_logits=True), mesh).train()


def run_training(
    mesh: Any,
    folder: Path,
    *,
    model: Any = None,
    data: Any = None,
    valid: Any = None,
    metrics: Any = None,
    dropout: float = 0.0,
    on_step: Any = None,
    updates: tuple[Any, Any] = (None, None),
    extra_files: Path | None = None,
    **arguments: Any,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Trains, by default a tiny T5: what was reported at each step (of its validation as `valid_loss` and so on), and
    the final weights.

    model: one, or what makes one of the mesh. on_step: is told each step and its loss. updates: an optimizer and a
    scheduler of its own.
    """
    from shardzoo.trainer import Trainer, TrainingArguments, gather_parameters
    from shardzoo.trainer.logging.reporter import SilentReporter

    class Record(SilentReporter):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def training(self, step: int, values: dict[str, float]) -> None:
            self.steps.append({"step": step, **values})
            if on_step is not None:
                on_step(step, values["loss"])

        def evaluation(self, step: int, values: dict[str, float], kind: str = "valid") -> None:
            self.steps[-1] |= {f"valid_{name}": value for name, value in values.items()}

    settings = {
        "lr": 1e-2,
        "micro_batch_size": 2,
        "train_steps": 4,
        "log_interval": 1,
        "save_dir": str(folder),
    }
    chosen = TrainingArguments(**{**settings, **arguments})
    reporter = Record()
    trainer = Trainer(chosen, mesh=mesh)
    if model is None:
        model = tiny_t5(dropout)
    elif not isinstance(model, torch.nn.Module):
        model = model(trainer.mesh)
    data = Pairs() if data is None else data
    trainer.train(model, *updates, data, valid, metrics, reporter=reporter, extra_files=extra_files)
    gather_parameters(model)
    return reporter.steps, {
        name: value.detach().clone() for name, value in model.named_parameters()
    }


def without_digests(checkpoint: Path) -> Path:
    """Makes a checkpoint one of an earlier version, whose state has no digests of the tokenizer's files."""
    from shardzoo.checkpoint.folder_files import STATE, holds_weights, read_state_file
    from shardzoo.files.json_digest import add_digest

    state = read_state_file(checkpoint)
    del state["version"]
    state["files"] = {
        name: digest for name, digest in state["files"].items() if holds_weights(name)
    }
    (checkpoint / STATE).write_text(json.dumps(add_digest(state)))
    return checkpoint


def losses(steps: list[dict[str, float]]) -> list[float]:
    return [step["loss"] for step in steps]


def on_ranks(
    run_mesh: Any,
    folder: Path,
    *,
    tp: int = 1,
    data_ranks: int = 1,
    stages: int = 1,
    context: int = 1,
    isolated: bool = False,
    **settings: Any,
) -> list[Any]:
    """`run_training` on every rank of a mesh, by rank."""
    sizes = {"data": data_ranks, "pipeline": stages, "context": context, "isolated": isolated}
    return run_mesh(tp, partial(run_training, folder=folder, **settings), **sizes)


def endless_losses(
    mesh: Any, folder: Path, config: dict[str, Any], logged: str = "loss", **changes: Any
) -> list[float]:
    """The losses of ten steps, or twenty before a release, with warm-up, clipping, and samples of unequal lengths and
    numbers of targets; or what else is logged under a name.

    A step has eight samples, two micro-batches of each data-parallel rank.
    """
    from shardzoo.models import ParallelConfig, from_config
    from shardzoo.trainer import Trainer, TrainingArguments
    from shardzoo.trainer.logging.reporter import SilentReporter

    class Samples:
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            start, stride = torch.randint(1, 97, (2,), generator=generator)
            tokens = (start + stride * torch.arange(24 - index % 5)) % 13
            labels = tokens.clone()
            labels[: index % 7] = -100
            return {"input_ids": tokens, "labels": labels}

    class Losses(SilentReporter):
        def __init__(self) -> None:
            self.values: list[float] = []

        def training(self, step: int, values: dict[str, float]) -> None:
            self.values.append(values[logged])

    settings: dict[str, Any] = {
        "env_type": "deepspeed+mpu",
        "train_steps": 20 if EVERY_CASE else 10,
        "lr": 5e-3,
        "warmup_steps": 4,
        "beta2": 0.95,
        "micro_batch_size": 4 // mesh.dp_size,
        "global_batch_size": 8,
        "clip_grad": 0.5,
        "log_interval": 1,
        "save_dir": str(folder),
    }
    sizes = {"model_parallel_size": mesh.tp_size, "pipeline_parallel_size": mesh.pp_size}
    arguments = TrainingArguments(**{**settings, **changes}, **sizes)
    parallel_config = ParallelConfig(arguments.sequence_parallel, arguments.recompute)
    model = from_config(config, mesh, parallel_config=parallel_config)
    reporter = Losses()
    Trainer(arguments, mesh=mesh).train(model, train_dataset=Samples(), reporter=reporter)
    return reporter.values
