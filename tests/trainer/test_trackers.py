"""What experiment trackers are told of a run: a recorder in their place, and those that are installed, offline."""

from __future__ import annotations

import importlib
import json
import struct
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
from training import Pairs, tiny_t5

from shardzoo.cli.arguments import parse
from shardzoo.cli.help import HelpPage
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments import trackers as tracker_names
from shardzoo.trainer.arguments.training_arguments import TrainingArguments
from shardzoo.trainer.logging import trackers


class Recorder:
    """Keeps what it is told, in `opened`, and fails in the methods that `fails` names."""

    opened: list[Recorder]
    fails: tuple[str, ...] = ()

    def __init__(self, run: trackers.TrackedRun) -> None:
        self.run, self.id, self.logged, self.closed = run, run.find_id("wandb"), [], None
        self.opened.append(self)
        self._may_fail("open")
        run.keep_id("wandb", self.id or f"id {len(self.opened)}")

    def log(self, step, values):
        self._may_fail("log")
        self.logged.append({"step": step, **values})

    def close(self, failed=False):
        self.closed = "failed" if failed else "finished"
        self._may_fail("close")

    def _may_fail(self, method):
        if method in self.fails:
            raise RuntimeError(f"[/no] service at {method}")


def recorder(*fails: str) -> type[Recorder]:
    """A `Recorder` in place of W&B's class, whose package is one that is installed."""
    made = type("Made", (Recorder,), {"opened": [], "fails": fails})
    trackers.SERVICES["wandb"] = made
    tracker_names.TRACKER_PACKAGES["wandb"] = "json"
    return made


@pytest.fixture(autouse=True)
def real_services():
    services = dict(trackers.SERVICES)
    packages = dict(tracker_names.TRACKER_PACKAGES)
    yield
    trackers.SERVICES.update(services)
    tracker_names.TRACKER_PACKAGES.update(packages)


def test_every_tracker_has_a_class():
    assert {"tensorboard", *trackers.SERVICES} == set(tracker_names.TRACKER_PACKAGES)


def train(folder: Path, report_to="wandb", **arguments) -> None:
    made = Trainer(
        save_dir=str(folder), report_to=report_to, log_interval=1, save_interval=2, **arguments
    )
    made.train(tiny_t5(), train_dataset=Pairs(40), valid_dataset=Pairs(4))


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_tracker_gets_the_arguments_and_every_value(tmp_path):
    kind = recorder()
    train(tmp_path / "run", train_steps=3, lr=0.01)
    [made] = kind.opened
    assert made.run.name == "run"
    assert made.run.arguments["lr"] == 0.01
    assert made.run.arguments.keys() == {field.name for field in fields(TrainingArguments)}
    assert made.logged == metrics(tmp_path / "run")
    assert [entry["step"] for entry in made.logged if "train/loss" in entry] == [1, 2, 3]
    assert "valid/loss" in made.logged[-1]
    assert made.closed == "finished"
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_resumed_run_goes_on_under_its_id_and_a_new_one_does_not(tmp_path):
    kind = recorder()
    train(tmp_path / "run", train_steps=2)
    train(tmp_path / "run", train_steps=4, resume=True)
    train(tmp_path / "other", train_steps=5, load_dir=str(tmp_path / "run"))
    assert [made.id for made in kind.opened] == [None, "id 1", None]
    assert [made.logged[0]["step"] for made in kind.opened] == [1, 3, 5]
    assert json.loads((tmp_path / "run" / "trackers.json").read_text()) == {"wandb": "id 1"}


def test_a_run_that_fails_is_closed_as_failed(tmp_path):
    kind = recorder()
    made = Trainer(save_dir=str(tmp_path), report_to="wandb", train_steps=2)
    made.forward_step = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        made.train(tiny_t5(), train_dataset=Pairs(40))
    assert [one.closed for one in kind.opened] == ["failed"]


def count_openings(folder: Path) -> int:
    kind = recorder()
    train(folder, env_type="pytorchDDP", train_steps=2)
    return len(kind.opened)


def test_only_the_first_rank_reports(run_ranks, tmp_path):
    assert run_ranks(2, count_openings, tmp_path, isolated=True) == [1, 0]


@pytest.mark.parametrize("method", ["open", "log", "close"])
def test_a_failing_tracker_is_told_once_and_the_run_goes_on(tmp_path, capsys, method):
    kind = recorder(method)
    train(tmp_path / "run", ("tensorboard", "wandb"), train_steps=3)
    said = "".join(capsys.readouterr().out.split())
    message = (
        f"wandb gets no more values, and the run goes on: RuntimeError: [/no] service at {method}"
    )
    assert said.count("".join(message.split())) == 1
    assert len(kind.opened) == 1
    assert [entry["step"] for entry in metrics(tmp_path / "run") if "train/loss" in entry] == [
        1,
        2,
        3,
    ]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_tensorboard_has_the_arguments(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "tensorboard", train_steps=2, lr=0.25)
    train(tmp_path, "tensorboard", train_steps=3, resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = events.Tensors("arguments/text_summary")
    assert "| lr | 0.25 |" in event.tensor_proto.string_val[0].decode()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


CHOICES = [
    ("none", ()),
    ([], ()),
    ("tensorboard", ("tensorboard",)),
    (["tensorboard", "wandb", "wandb"], ("tensorboard", "wandb")),
]


@pytest.mark.parametrize(("given", "taken"), CHOICES)
def test_report_to_names_the_trackers(given, taken):
    recorder()
    assert TrainingArguments(report_to=given).report_to == taken


def test_the_command_line_names_several():
    recorder()
    words = ["--report_to", "tensorboard", "wandb", "--lr", "0.5"]
    made = parse(TrainingArguments, HelpPage("test", TrainingArguments), words, quiet=True)
    assert (made.report_to, made.lr) == (("tensorboard", "wandb"), 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("wandb", "report_to=wandb needs the package no_such_package: pip install no_such_package"),
        (
            ["tensorbord"],
            r"must name trackers of tensorboard, wandb, mlflow, comet, or be none; it names 'tensorbord'",
        ),
        (["none", "tensorboard"], "it names 'none'"),
        (3, "report_to must be a list of strings, not 3"),
    ],
)
def test_what_cannot_be_reported_to_is_refused_before_training(given, message):
    tracker_names.TRACKER_PACKAGES["wandb"] = "no_such_package"
    with pytest.raises(ValueError, match=message):
        TrainingArguments(report_to=given)


def installed(package: str):
    return pytest.importorskip(package, reason=f"{package} is not installed")


def train_and_resume(folder: Path, name: str) -> list[dict]:
    train(folder, name, train_steps=2, lr=0.25)
    train(folder, name, train_steps=3, lr=0.25, resume=True)
    return metrics(folder)


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wanted = train_and_resume(tmp_path, "wandb")
    [run_id] = json.loads((tmp_path / "trackers.json").read_text()).values()
    kind = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    files = sorted(
        tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    )
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    rows, configs = [], {}
    for record in (
        kind.FromString(data) for file in files for data in log_records(file.read_bytes()[7:])
    ):
        configs |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        rows += (
            [{name: value for name, value in row.items() if not name.startswith("_")}]
            if row
            else []
        )
    assert configs["lr"] == 0.25
    assert rows == [{"train/global_step": row.pop("step"), **row} for row in wanted]


def log_records(data: bytes) -> list[bytes]:
    """The records of a log of LevelDB, after W&B's header of 7 bytes, which is a part of the first block of 32 KiB."""
    records, position, block = [], 0, 1 << 15
    while position < len(data):
        left = block - (position + 7) % block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 2):  # whole, or a first part
            records.append(part)
        else:
            records[-1] += part
    return records


def test_mlflow_in_a_database(tmp_path, monkeypatch):
    mlflow = installed("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    wanted = train_and_resume(tmp_path / "run", "mlflow")
    [run_id] = json.loads((tmp_path / "run" / "trackers.json").read_text()).values()
    client = mlflow.MlflowClient(store)
    [found] = client.search_runs(["0"])
    assert found.info.run_id == run_id
    assert found.info.status == "FINISHED"
    assert found.data.params["lr"] == "0.25"
    for name in ("train/loss", "valid/loss"):
        history = [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
        assert sorted(history) == [(row["step"], row[name]) for row in wanted if name in row]
    assert mlflow.active_run() is None


def test_comet_offline(tmp_path, monkeypatch):
    installed("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    wanted = train_and_resume(tmp_path, "comet")
    [key] = json.loads((tmp_path / "trackers.json").read_text()).values()
    points, parameters = [], {}
    archives = sorted((tmp_path / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len(archives) == 2
    for archive in archives:
        with zipfile.ZipFile(archive) as files:
            assert json.loads(files.read("experiment.json"))["offline_id"] == key
            for line in files.read("messages.json").splitlines():
                message = json.loads(line)
                payload = message["payload"]
                if (
                    message["type"] == "metric_msg"
                    and payload["metric"]["metricName"] == "train/loss"
                ):
                    points.append(
                        (payload["metric"]["step"], float(payload["metric"]["metricValue"]))
                    )
                if message["type"] == "parameter_msg" and payload["param"]["paramName"] == "lr":
                    parameters["lr"] = payload["param"]["paramValue"]
    assert parameters == {"lr": "0.25"}
    assert points == [
        (row["step"], pytest.approx(row["train/loss"])) for row in wanted if "train/loss" in row
    ]
