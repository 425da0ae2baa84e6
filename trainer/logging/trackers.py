"""Logs the arguments and values of a run to experiment trackers: TensorBoard, Weights & Biases,
MLflow and Comet.

Each has its own settings for where it writes, such as WANDB_MODE, MLFLOW_TRACKING_URI and
COMET_START_ONLINE.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ...files.durable import write_durably

# A file in the run's folder with the id that each tracker gave the run; a resumed run continues
# under it.
RUN_IDS = "trackers.json"
STEP = "train/global_step"  # the step of a value at Weights & Biases, as in transformers
LONGEST_PARAMETER = 6000  # characters of a value at MLflow


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run.

    Attributes:
        first_step: The step at which this process begins; above 0 a run goes on.
    """

    name: str
    arguments: Mapping[str, Any]
    folder: Path
    first_step: int

    def find_id(self, tracker: str) -> str | None:
        """Returns the id that a tracker gave this run, if the run goes on."""
        file = self.folder / RUN_IDS
        if not self.first_step or not file.exists():
            return None
        return json.loads(file.read_text()).get(tracker)

    def keep_id(self, tracker: str, given: str) -> None:
        """Stores the id that a tracker gave this run."""
        file = self.folder / RUN_IDS
        known = {}
        if file.exists():
            known = json.loads(file.read_text())
        if known.get(tracker) != given:
            write_durably(file, json.dumps({**known, tracker: given}, indent=2) + "\n")


class Tracker(Protocol):
    """A destination of logged values. The constructor opens it, and logs the run's arguments.

    `close` is told whether an exception has ended the run.
    """

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def close(self, failed: bool = False) -> None: ...


class TensorBoard:
    """Writes TensorBoard events.

    Hides those of steps after the run's first one that are from before a kill.
    """

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # The file is opened at the first value, because a run may yet be refused.
        self._open = partial(SummaryWriter, str(folder), purge_step=run.first_step + 1)
        self._writer: SummaryWriter | None = None
        self._run = run
        self._hook = threading.excepthook
        threading.excepthook = self._report

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open()
            if not self._run.first_step:
                rows = "\n".join(
                    f"| {name} | {value} |" for name, value in self._run.arguments.items()
                )
                self._writer.add_text("arguments", f"| argument | value |\n|---|---|\n{rows}", step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool = False) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            for thread in threading.enumerate():
                # A thread that failed has told its error, and is about to report it.
                if _is_writer(thread) and getattr(thread, "exception", None):
                    thread.join()
            threading.excepthook = self._hook

    def _report(self, failure: threading.ExceptHookArgs) -> None:
        """Prints what ended a thread.

        The writer's thread tells its error to the next call of `log` or `close`.
        """
        if not _is_writer(failure.thread):
            self._hook(failure)


def _is_writer(thread: threading.Thread | None) -> bool:
    return type(thread).__module__.startswith("tensorboard.")


class WeightsAndBiases:
    """Logs to Weights & Biases.

    A step that is trained again after a kill is logged again, with the same values.
    """

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = import_module("wandb")
        goes_on: dict[str, Any] = {}
        known = run.find_id("wandb")
        if known is not None:
            goes_on = {"id": known, "resume": "allow"}
        config = {name: _plain(value) for name, value in run.arguments.items()}
        self._run = wandb.init(
            name=run.name,
            config=config,
            dir=str(run.folder),
            allow_val_change=bool(goes_on),
            **goes_on,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        run.keep_id("wandb", self._run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Logs to MLflow, beside a run that the script may have open there."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow: Any = import_module("mlflow")
        known = run.find_id("mlflow")
        opened = self._mlflow.start_run(
            run_id=known,
            run_name=None if known else run.name,
            nested=self._mlflow.active_run() is not None,
        )
        self._id = opened.info.run_id
        if known is None:  # parameters of a run cannot change
            texts = {
                name: str(_plain(value))[:LONGEST_PARAMETER]
                for name, value in run.arguments.items()
            }
            self._mlflow.log_params(texts)
        run.keep_id("mlflow", self._id)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step, run_id=self._id)

    def close(self, failed: bool = False) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class Comet:
    """Logs to Comet; an offline experiment is stored in the run's folder unless
    COMET_OFFLINE_DIRECTORY is set.
    """

    def __init__(self, run: TrackedRun) -> None:
        comet: Any = import_module("comet_ml")
        offline = os.environ.get("COMET_OFFLINE_DIRECTORY", str(run.folder / "comet"))
        quiet = dict.fromkeys(
            ("log_code", "log_git_patch", "parse_args", "auto_metric_logging"), False
        )
        settings = comet.ExperimentConfig(name=run.name, offline_directory=offline, **quiet)
        known = run.find_id("comet")
        self._experiment = comet.start(
            experiment_key=known, mode="get" if known else "create", experiment_config=settings
        )
        self._experiment.log_parameters(
            {name: str(_plain(value)) for name, value in run.arguments.items()}
        )
        run.keep_id("comet", self._experiment.get_key())

    def log(self, step: int, values: dict[str, float]) -> None:
        self._experiment.log_metrics(values, step=step)

    def close(self, failed: bool = False) -> None:
        self._experiment.log_other("failed", failed)
        self._experiment.end()


def _plain(value: Any) -> Any:
    """Returns a number, a text or None as it is, and the text of anything else."""
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)


class NeverFailing:
    """A tracker whose failures do not end the run: the first one is told by `notify`, and ends the
    tracker.
    """

    def __init__(
        self, name: str, opened: Callable[[], Tracker], notify: Callable[[str], None]
    ) -> None:
        self._name = name
        self._notify = notify
        self._tracker: Tracker | None = None
        self._try(lambda: setattr(self, "_tracker", opened()))

    def log(self, step: int, values: dict[str, float]) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._try(lambda: tracker.log(step, values))

    def close(self, failed: bool = False) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._try(lambda: tracker.close(failed))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._tracker = None
            self._notify(
                f"{self._name} gets no more values, and the run goes on: {type(error).__name__}: {error}"
            )


# The trackers that may fail without ending a run. TensorBoard's events are files of the run's
# folder, whose disk the run needs itself. `arguments/trackers.py` has their packages.
SERVICES: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "comet": Comet,
}


def open_trackers(
    names: Sequence[str], run: TrackedRun, tensorboard: Path, notify: Callable[[str], None]
) -> list[Tracker]:
    """Opens the trackers of a run.

    Args:
        tensorboard: The folder of TensorBoard's events.
        notify: Called with a message when a service fails.
    """
    trackers: list[Tracker] = []
    if "tensorboard" in names:
        trackers.append(TensorBoard(run, tensorboard))
    for name in names:
        if name in SERVICES:
            trackers.append(NeverFailing(name, partial(SERVICES[name], run), notify))
    return trackers
