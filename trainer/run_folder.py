"""The folder of a run: where its files lie, and that two runs never share one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

STEP_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run.

    arguments.yaml: every argument, in the form `--config` reads. metrics.jsonl: a line for each logged step.
    checkpoints/step-NNNNNN: complete training checkpoints. data/: the prepared corpus and its tokenizer.
    """

    path: Path

    @property
    def arguments_file(self) -> Path:
        return self.path / "arguments.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def latest_step(self) -> int | None:
        """The last step with a complete checkpoint."""
        if not self.checkpoints.is_dir():
            return None
        names = (STEP_FOLDER.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return max((int(name[1]) for name in names if name), default=None)

    def first_step(self, *, resume: bool, overwrite: bool) -> int:
        """The step that a run in this folder begins with: 0 for a new run. Changes nothing.

        ValueError if the folder holds another run and neither `resume` nor `overwrite` was asked for, if it holds
        files that are no run's, or if there is nothing to resume.
        """
        if resume and overwrite:
            raise ValueError("--resume goes on with a run and --overwrite deletes it: use one of them")
        step = self.latest_step()
        if resume:
            if step is None:
                raise ValueError(f"--resume: {self.path} holds no complete checkpoint; start anew without --resume")
            return step
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"output_dir {self.path} is a file; name a folder")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return 0
        if not self.arguments_file.exists():
            raise ValueError(f"output_dir {self.path} holds files that are not a run's; choose another folder")
        if not overwrite:
            reached = f"saved at step {step}" if step else "with nothing saved yet"
            raise ValueError(
                f"output_dir {self.path} holds another run ({reached}); go on with it by --resume, "
                f"replace it by --overwrite, or choose another --output-dir"
            )
        return 0

    def begin(self, arguments: dict[str, object], data: Path) -> None:
        """Makes the folder a new run's, in place of what it held; moves the prepared corpus `data` into it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self.arguments_file.write_text(yaml.safe_dump(arguments, sort_keys=False))
        data.rename(self.data)

    def go_on(self, arguments: dict[str, object], step: int) -> None:
        """Makes the folder's metrics end at `step`, the one to go on from."""
        self.arguments_file.write_text(yaml.safe_dump(arguments, sort_keys=False))
        self._forget_metrics_after(step)

    def _forget_metrics_after(self, step: int) -> None:
        if self.metrics_file.exists():
            kept = [record for record in self.metrics() if record["step"] <= step]
            self.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def metrics(self) -> list[dict[str, float]]:
        """Logged values by step; a line cut short by a crash is left out."""
        records = []
        for line in self.metrics_file.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return records
