"""Compares the step times that `shardzoo plan` predicts for this machine with those that the trainer takes.

    python benchmarks/calibration.py [--rows 0 1 2] [--json benchmarks/results/calibration_cpu.json]

`plan --calibrate` measures the machine for one process and for two, unless their files are passed. Then the trainer
runs each configuration of `ROWS` for some steps on random tokens: other families, sizes and layouts than those that
the calibration trains. The exit code is 1 if the median error exceeds 15 %. Rows that are measured again replace their
figures in the JSON file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from shardzoo.models import find_config, from_config
from shardzoo.models.config import ModelConfig
from shardzoo.plan import PlannedRun, find_cluster, step_time
from shardzoo.plan.layouts import build_network
from shardzoo.trainer import Trainer

STEPS, WARM_UP, MOST = 9, 3, 0.15


@dataclass(frozen=True)
class Row:
    """A configuration: a model, the shape of its micro-batch, and a layout."""

    preset: str
    changes: dict[str, Any]
    batch: int
    length: int
    target_length: int = 0
    micro_batches: int = 1
    tensor: int = 1
    pipeline: int = 1
    processes: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the trainer: recompute, sequence_parallel, precision."""

    @property
    def config(self) -> ModelConfig:
        return find_config(self.preset).with_changes(**self.changes)

    @property
    def title(self) -> str:
        layers = "/".join(str(self.changes[name]) for name in self.changes if "layer" in name)
        shape = f"{self.batch} x {self.length}" + (
            f"/{self.target_length}" if self.target_length else ""
        )
        width = build_network(self.config).hidden
        return f"{self.preset}, {layers} layers of {width}, {shape}, x {self.micro_batches}"

    @property
    def layout(self) -> str:
        data = self.processes // (self.tensor * self.pipeline)
        extra = ", ".join(
            name if value is True else str(value) for name, value in self.extra.items()
        )
        return f"{self.tensor} x {self.pipeline} x {data}" + (f", {extra}" if extra else "")

    def arguments(self, folder: str) -> dict[str, Any]:
        layout = {
            "model_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline, "num_gpus": self.processes,
            "env_type": "deepspeed+mpu" if self.tensor * self.pipeline > 1 else "pytorchDDP",
        }  # fmt: skip
        return {
            "train_steps": STEPS, "micro_batch_size": self.batch, "gradient_accumulation_steps": self.micro_batches,
            "log_interval": 1, "save_interval": 1 << 30, "save_optim": False, "save_dir": folder, **self.extra,
            **(layout if self.processes > 1 else {}),
        }  # fmt: skip

    @property
    def run(self) -> PlannedRun:
        settings = {name: value for name, value in self.extra.items() if name != "precision"}
        batch = self.batch * self.micro_batches * self.processes // (self.tensor * self.pipeline)
        return PlannedRun(
            self.processes, batch, self.batch, self.length, self.target_length, self.tensor, self.pipeline,
            zero_stage=0, itemsize=4, gradient_itemsize=4, **settings,
        )  # fmt: skip

    def predicted(self, device: str) -> float:
        return step_time(build_network(self.config), self.run, find_cluster(device)).total


def gpt2(width: int, layers: int, heads: int, vocabulary: int = 8192) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary}


def bert(width: int, layers: int, heads: int, vocabulary: int = 8192) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"intermediate_size": 4 * width, "vocab_size": vocabulary}


def t5(width: int, layers: int, heads: int, inner: int, vocabulary: int = 8192) -> dict[str, Any]:
    sizes = {
        "d_model": width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "d_ff": inner,
    }
    return sizes | {"vocab_size": vocabulary}


LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
LLAMA |= {"num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 1024}
ROWS = (
    Row("gpt2", gpt2(384, 6, 6), 4, 256),
    Row("gpt2", gpt2(640, 3, 10, 16_384), 2, 384, micro_batches=3),
    Row("gpt2", gpt2(512, 4, 8), 4, 256, extra={"recompute": "full"}),
    Row("gpt2", gpt2(512, 4, 8), 4, 256, extra={"recompute": "selective"}),
    Row("bert-base-uncased", bert(768, 3, 12, 30_522), 8, 128),
    Row("roberta-base", bert(512, 4, 8), 2, 512),
    Row("t5-small", t5(512, 3, 8, 2048, 32_128), 8, 192, 48),
    Row("t5-v1_1-base", t5(768, 2, 12, 2048), 4, 256, 128),
    Row("mt5-small", t5(512, 3, 6, 1024, 50_000), 4, 128, 32),
    Row("llama-quickstart", LLAMA, 4, 256),
    Row("gpt2", gpt2(512, 4, 8), 4, 256, tensor=2, processes=2),
    Row(
        "gpt2",
        gpt2(768, 2, 12),
        2,
        512,
        micro_batches=2,
        tensor=2,
        processes=2,
        extra={"sequence_parallel": True},
    ),
    Row("bert-base-uncased", bert(768, 3, 12, 30_522), 4, 128, tensor=2, processes=2),
    Row(
        "roberta-base", bert(512, 4, 8), 4, 256, tensor=2, processes=2, extra={"recompute": "full"}
    ),
    Row("t5-small", t5(512, 3, 8, 2048), 8, 192, 48, tensor=2, processes=2),
    Row("llama-quickstart", LLAMA, 4, 256, tensor=2, processes=2),
    Row("gpt2", gpt2(512, 4, 8), 2, 256, micro_batches=4, pipeline=2, processes=2),
    Row("t5-small", t5(512, 2, 8, 2048), 4, 128, 64, micro_batches=6, pipeline=2, processes=2),
    Row("gpt2", gpt2(512, 4, 8), 4, 256, processes=2),
    Row("t5-v1_1-base", t5(768, 2, 12, 2048), 4, 128, 64, micro_batches=2, processes=2),
)


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    rows: tuple[int, ...] = tuple(range(len(ROWS)))
    one: Path | None = None
    """Figures of the machine for one process, from `plan --calibrate`."""
    two: Path | None = None
    """The same for two processes."""
    json: Path | None = None
    measure: tuple[str, str] | None = None
    """For the processes that train: a row as JSON, and the folder of its run."""


class Samples:
    """An endless dataset of random tokens."""

    def __init__(self, row: Row) -> None:
        self.row, self.vocabulary = row, row.config.vocab_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, self.vocabulary, (self.row.length,), generator=generator)
        return {
            "input_ids": ids,
            "labels": ids[: self.row.target_length or self.row.length].clone(),
        }


def train(text: str, folder: str) -> None:
    row = Row(**json.loads(text))
    trainer = Trainer(**row.arguments(folder))
    trainer.train(from_config(row.config, trainer.mesh), train_dataset=Samples(row))


def measured(row: Row) -> float:
    """Returns the median seconds of the steps that the trainer takes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", json.dumps(asdict(row)), folder]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{row.title} failed: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        records = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
    return median(
        [record["train/seconds"] for record in records if "train/seconds" in record][WARM_UP:]
    )


def calibrated(path: Path | None, processes: int) -> str:
    """Returns a file with the machine's figures, which is made if none is passed."""
    if path is None:
        path = Path(tempfile.mkdtemp(), "machine.yaml")
        command = [
            "shardzoo",
            "plan",
            "--calibrate",
            str(path),
            "--node-size",
            str(processes),
            "--precision",
            "fp32",
        ]
        subprocess.run(command, check=True)
    return str(path)


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.measure:
        train(*arguments.measure)
        return 0
    devices = {1: calibrated(arguments.one, 1), 2: calibrated(arguments.two, 2)}
    found = (
        json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    )
    for number in arguments.rows:
        row = ROWS[number]
        found[str(number)] = {
            "model": row.title, "layout": row.layout, "predicted": row.predicted(devices[row.processes]),
            "measured": measured(row),
        }  # fmt: skip
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return report(found)


def report(found: dict[str, dict[str, Any]]) -> int:
    table = Table(title="seconds of a training step, fp32", title_justify="left")
    for name in ("model", "TP x PP x DP", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "model" else "right")
    errors: list[float] = []
    for _, row in sorted(found.items(), key=lambda item: int(item[0])):
        errors.append(row["predicted"] / row["measured"] - 1)
        table.add_row(
            row["model"],
            row["layout"],
            f"{row['predicted']:.3f}",
            f"{row['measured']:.3f}",
            f"{errors[-1]:+.1%}",
        )
    sizes = [abs(error) for error in errors]
    console = Console(width=130)
    console.print(table)
    console.print(
        f"{len(sizes)} configurations: median error {median(sizes):.1%}, worst {max(sizes):.1%}"
    )
    return int(median(sizes) > MOST)


if __name__ == "__main__":
    sys.exit(main())
