"""Runs whose folder is in an object store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_runs import train

import shardzoo
from shardzoo.convert.operations import merge, split
from shardzoo.data.indexed.writer import IndexedDatasetWriter
from shardzoo.files import working_copies
from shardzoo.files.object_store import (
    find_object,
    list_objects,
    read_object,
    remove_object,
    write_object,
)
from shardzoo.files.working_copies import find_work
from shardzoo.trainer import store_lease
from shardzoo.trainer.run_lock import LOCK, return_folder, take_folder


def losses(content: bytes) -> list[float]:
    return [json.loads(line)["train/loss"] for line in content.splitlines()]


def checkpoint_files(url: str, step: int) -> dict[str, bytes]:
    folder = f"{url}/checkpoints/step-{step:06d}"
    return {name: read_object(f"{folder}/{name}") for name in list_objects(folder)}


def test_a_run_in_a_store_equals_one_on_a_disk(memory_bucket, tmp_path):
    url = f"{memory_bucket}/run"
    here = train(tmp_path / "run", 6)
    first = train(url, 4)
    assert not torch.equal(first.inner.weight, here.inner.weight)
    with pytest.raises(ValueError, match=f"{url} holds a run that is saved at step 4"):
        train(url, 6)
    there = train(url, 6, resume=True)
    assert torch.equal(there.inner.weight, here.inner.weight)

    names = list_objects(url)
    assert ".run.lock" not in names
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {
        "step-000002",
        "step-000004",
        "step-000006",
    }
    folder = tmp_path / "run" / "checkpoints" / "step-000006"
    stored = checkpoint_files(url, 6)
    assert stored.keys() == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        assert stored[path.name] == path.read_bytes(), path.name
    logged = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert losses(read_object(f"{url}/metrics.jsonl")) == losses(logged)


def test_only_the_last_checkpoints_are_kept(memory_bucket):
    url = f"{memory_bucket}/run"
    train(url, 8, save_total_limit=1)
    steps = {name.split("/")[1] for name in list_objects(url) if name.startswith("checkpoints/")}
    assert steps == {"step-000008"}


def test_a_checkpoint_without_its_state_is_none(memory_bucket):
    url = f"{memory_bucket}/run"
    train(url, 4)
    remove_object(f"{url}/checkpoints/step-000004/trainer_state.json")
    train(url, 4, resume=True)
    assert "checkpoints/step-000004/trainer_state.json" in list_objects(url)


def test_another_machine_resumes(memory_bucket, tmp_path, monkeypatch):
    url = f"{memory_bucket}/run"
    here = train(tmp_path / "run", 6)
    train(url, 4)
    monkeypatch.setenv("SHARDZOO_OBJECTS", str(tmp_path / "other"))
    there = train(url, 6, resume=True)
    assert torch.equal(there.inner.weight, here.inner.weight)
    assert len(losses(read_object(f"{url}/metrics.jsonl"))) == 6
    again = train(tmp_path / "on-a-disk", 6, load_dir=f"{url}/checkpoints/step-000002")
    assert torch.equal(again.inner.weight, here.inner.weight)


def test_a_damaged_checkpoint_is_left_behind(memory_bucket, capsys):
    url = f"{memory_bucket}/run"
    train(url, 4)
    name = f"{url}/checkpoints/step-000004/model.safetensors"
    content = bytearray(read_object(name))
    content[-1] ^= 1
    write_object(name, bytes(content))
    before = checkpoint_files(url, 2)
    train(url, 4, resume=True)
    assert "step-000004 is damaged" in capsys.readouterr().out.replace("\n", " ")
    assert read_object(name) != bytes(content)
    assert checkpoint_files(url, 2) == before


def test_a_model_that_is_written_into_a_run_is_sent_with_the_run(memory_bucket, gpt2_folder):
    url = f"{memory_bucket}/run"
    folder = find_work(url)
    take_folder(folder)
    (folder / "metrics.jsonl").write_text("not sent yet")
    (folder / "hf").mkdir()
    merge(gpt2_folder, folder / "hf")
    shardzoo.from_pretrained(gpt2_folder).save_pretrained(folder / "again")
    with IndexedDatasetWriter(folder / "data" / "train") as writer:
        writer.add_sequence([1, 2])
    assert (folder / "metrics.jsonl").read_text() == "not sent yet"
    assert set(list_objects(memory_bucket)) == {"run/.run.lock"}
    return_folder(folder)
    sent = {name.split("/")[1] for name in list_objects(memory_bucket)}
    assert sent == {"metrics.jsonl", "hf", "again", "data"}


def test_a_finetuned_model_is_sent(memory_bucket, gpt2_folder, tmp_path):
    from tiny_models import save_model

    from shardzoo import finetuning

    save_model(tmp_path / "gpt2", "GPT2LMHeadModel", "gpt2")
    (tmp_path / "text.txt").write_text("a few words of a text that is long enough\n\n" * 20)
    url = f"{memory_bucket}/run"
    trainer = finetuning.Trainer(
        model_name_or_path=str(tmp_path / "gpt2"),
        train_file=str(tmp_path / "text.txt"),
        block_size=32,
        train_steps=1,
        output_dir=url,
        report_to="none",
    )
    trainer.train(valid=False)
    trainer.save_model()
    names = list_objects(f"{url}/hf")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names.keys()
    assert ".run.lock" not in list_objects(url)
    trainer.save_model(f"{memory_bucket}/elsewhere")
    trainer.save_model(tmp_path / "here")
    assert list_objects(f"{memory_bucket}/elsewhere").keys() == names.keys()
    for name in names:
        wanted = (tmp_path / "here" / name).read_bytes()
        assert read_object(f"{url}/hf/{name}") == wanted, name
        assert read_object(f"{memory_bucket}/elsewhere/{name}") == wanted, name
    shardzoo.from_pretrained(f"{url}/hf")


def test_a_model_within_a_run_is_read_only_when_it_is_complete(
    memory_bucket, gpt2_folder, monkeypatch
):
    url = f"{memory_bucket}/run"
    folder = find_work(url)
    take_folder(folder)
    merge(gpt2_folder, folder / "hf")
    refused: list[str] = []
    upload = working_copies.upload

    def read_meanwhile(path, target):
        with pytest.raises(ValueError, match=r"is not complete|there is nothing at"):
            shardzoo.from_pretrained(f"{url}/hf")
        refused.append(target)
        upload(path, target)

    monkeypatch.setattr(working_copies, "upload", read_meanwhile)
    return_folder(folder)
    assert len(refused) >= 2
    shardzoo.from_pretrained(f"{url}/hf")
    # A mark that was left by a run that was killed goes when the folder is complete.
    write_object(f"{url}/hf/{working_copies.INCOMPLETE}", b"")
    take_folder(folder)
    return_folder(folder)
    shardzoo.from_pretrained(f"{url}/hf")


def test_a_step_is_called_saved_when_it_is_in_the_store(memory_bucket, monkeypatch):
    from shardzoo.trainer.logging.reporter import RunReporter

    url = f"{memory_bucket}/run"
    notice = RunReporter.notice
    found: dict[str, bool] = {}

    def look(reporter, text: str) -> None:
        notice(reporter, text)
        step, _, folder = text.partition(": saved ")
        if folder:
            found[step] = find_object(f"{folder}/trainer_state.json") is not None

    monkeypatch.setattr(RunReporter, "notice", look)
    train(url, 5)
    assert found == {"step 2": True, "step 4": True, "step 5": True}


def test_the_board_follows_a_run(memory_bucket, gpt2_folder, tmp_path, monkeypatch, capsys):
    from shardzoo.cli.board import command, stored_run
    from shardzoo.cli.main import main

    monkeypatch.setattr(stored_run, "SECONDS_BETWEEN_LOOKS", 0.02)
    url = f"{memory_bucket}/run"

    def wait_until(read: Callable[[], object], value: object) -> None:
        deadline = time.monotonic() + 20
        while read() != value and time.monotonic() < deadline:
            time.sleep(0.02)
        assert read() == value

    def wait_for(name: str, value: object) -> None:
        wait_until(lambda: runs.data({})["runs"][0][name], value)

    write_object(f"{url}/{LOCK}", b"{}")  # a run that has just begun
    runs = command.Runs([command.Run(Path(url))])
    assert runs.data({})["runs"][0]["name"] == url
    remove_object(f"{url}/{LOCK}")
    train(url, 4)
    wait_for("checkpoints", [2, 4])
    wait_for("step", 4)
    train(url, 6, resume=True, save_total_limit=1)
    wait_for("checkpoints", [6])
    # A page that is read while a file is being copied is whole from the next look on.
    steps = [1, 2, 3, 4, 5, 6]
    wait_until(lambda: [chart["steps"] for chart in runs.data({})["charts"][:1]], [steps])
    missing = f"{url}/checkpoints/step-000006 has no manifest.json"
    wait_until(lambda: missing in runs.runs[0].layout().get("error", ""), True)
    split(gpt2_folder, tmp_path / "split", 2)
    manifest = (tmp_path / "split" / "manifest.json").read_bytes()
    write_object(f"{url}/checkpoints/step-000008/manifest.json", manifest)
    write_object(f"{url}/checkpoints/step-000008/trainer_state.json", b"{}")
    wait_for("checkpoints", [6, 8])
    # A checkpoint that comes between a look's two questions has its layout from the next look on.
    wait_until(lambda: runs.runs[0].layout().get("ranks"), 2)

    def refuse(url):
        raise OSError(5, "the store cannot be reached", url)

    list_all = stored_run.list_objects
    monkeypatch.setattr(stored_run, "list_objects", refuse)
    wait_for("problem", f"cannot read or write {url}: the store cannot be reached")
    wait_for("step", 6)
    monkeypatch.setattr(stored_run, "list_objects", list_all)
    wait_for("problem", "")
    assert main(["board", f"{memory_bucket}/none", "--port", "0"]) == 2
    assert f"error: {memory_bucket}/none holds no run" in capsys.readouterr().err


def test_one_run_at_a_time_uses_a_folder(memory_bucket, monkeypatch, tmp_path):
    url = f"{memory_bucket}/run"
    folder = find_work(url)
    take_folder(folder)
    owner = json.loads(read_object(f"{url}/.run.lock"))
    assert owner["process"] == os.getpid()
    # A process that has another folder for local copies does not see this one's lock file.
    monkeypatch.setenv("SHARDZOO_OBJECTS", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=f"{url} is in use by process {os.getpid()}"):
        take_folder(find_work(url))
    return_folder_at(folder, monkeypatch, tmp_path)
    assert find_object(f"{url}/.run.lock") is None


def return_folder_at(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDZOO_OBJECTS", str(folder.parents[2]))
    return_folder(folder)


def test_the_lease_of_a_process_that_has_ended_is_replaced(memory_bucket, monkeypatch):
    url = f"{memory_bucket}/run"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = {"host": store_lease.socket.gethostname(), "namespace": store_lease.find_namespace()}
    write_object(f"{url}/.run.lock", json.dumps({**here, "process": ended.pid}).encode())
    folder = find_work(url)
    take_folder(folder)
    return_folder(folder)

    # Of a process elsewhere, only its signs of life tell.
    monkeypatch.setattr(store_lease, "SECONDS_WITHOUT_SIGN", 0.2)
    monkeypatch.setattr(store_lease, "SECONDS_TO_SETTLE", 0.0)
    elsewhere = json.dumps({"host": "elsewhere", "process": 1, "token": "other"}).encode()
    write_object(f"{url}/.run.lock", elsewhere)
    said: list[str] = []
    take_folder(folder, said.append)
    assert "waiting to see whether process 1 on elsewhere still runs" in said[0]

    # Another one has taken it meanwhile.
    write_object(f"{url}/.run.lock", elsewhere)
    from shardzoo.trainer.run_lock import check_not_lost

    with pytest.raises(ValueError, match="no longer this run's"):
        check_not_lost(folder)
    (folder / "metrics.jsonl").write_text("{}")
    return_folder(folder)
    assert "metrics.jsonl" not in list_objects(url)
    assert read_object(f"{url}/.run.lock") == elsewhere


def test_a_reservation_whose_answer_is_lost_is_ones_own(memory_bucket, monkeypatch):
    url = f"{memory_bucket}/run"

    def write_twice(address, content, *, create=False):
        write_object(address, content, create=create)
        write_object(address, content, create=create)

    monkeypatch.setattr(store_lease, "write_object", write_twice)
    folder = find_work(url)
    take_folder(folder)
    assert json.loads(read_object(f"{url}/{LOCK}"))["process"] == os.getpid()
    return_folder(folder)
    assert find_object(f"{url}/{LOCK}") is None


def test_a_store_that_replaces_what_it_should_only_make(memory_bucket, monkeypatch, tmp_path):
    url = f"{memory_bucket}/run"

    def replace_always(address, content, *, create=False):
        write_object(address, content)

    monkeypatch.setattr(store_lease, "write_object", replace_always)
    monkeypatch.setattr(store_lease, "SECONDS_TO_SETTLE", 0.0)
    folder = find_work(url)
    take_folder(folder)
    monkeypatch.setenv("SHARDZOO_OBJECTS", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=f"{url} is in use by process {os.getpid()}"):
        take_folder(find_work(url))
    return_folder_at(folder, monkeypatch, tmp_path)

    # Another run begins at the same moment, and writes last.
    def lose(address, content, *, create=False):
        replace_always(address, content)
        write_object(address, json.dumps({"token": "other"}).encode())

    monkeypatch.setattr(store_lease, "write_object", lose)
    with pytest.raises(ValueError, match=f"{url} was taken by another run just now"):
        take_folder(folder)


def test_a_live_owner_elsewhere_keeps_the_folder(memory_bucket, monkeypatch):
    url = f"{memory_bucket}/run"
    monkeypatch.setattr(store_lease, "SECONDS_WITHOUT_SIGN", 5.0)
    content = {"host": "elsewhere", "process": 1, "token": "other"}
    write_object(f"{url}/.run.lock", json.dumps(content).encode())

    def sign(text: str) -> None:
        content["signs"] = 1
        write_object(f"{url}/.run.lock", json.dumps(content).encode())

    def notify(text: str) -> None:
        threading.Timer(0.2, sign, [""]).start()

    with pytest.raises(ValueError, match=f"{url} is in use by process 1 on elsewhere"):
        take_folder(find_work(url), notify)
    assert json.loads(read_object(f"{url}/.run.lock"))["token"] == "other"
