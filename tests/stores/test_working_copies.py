"""What is sent, and in which order."""

from __future__ import annotations

import pytest

from shardzoo.files import working_copies
from shardzoo.files.object_store import list_objects, read_object, write_object
from shardzoo.files.working_copies import INCOMPLETE, find_source, find_work, pull, push


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    """What a push does to the store, in order."""
    found: list[str] = []

    def note(name: str) -> None:
        original = getattr(working_copies, name)

        def call(*arguments, **options):
            url = next(part for part in arguments if isinstance(part, str))
            found.append(f"{name} {url.rpartition('/')[2]}")
            return original(*arguments, **options)

        monkeypatch.setattr(working_copies, name, call)

    for name in ("upload", "write_object", "remove_object"):
        note(name)
    return found


def test_what_describes_a_model_goes_first_and_comes_last(memory_bucket, steps):
    url = f"{memory_bucket}/model"
    folder = find_work(url)
    folder.mkdir()
    for name in ("manifest.json", "config.json", "rank_00.safetensors", "tokenizer.json"):
        (folder / name).write_text("first")
    push(folder)
    sent = ["rank_00.safetensors", "tokenizer.json", "config.json", "manifest.json"]
    uploads = [f"upload {name}" for name in sent]
    assert steps == [f"write_object {INCOMPLETE}", *uploads, f"remove_object {INCOMPLETE}"]
    steps.clear()
    push(folder)
    assert steps == []

    for name in ("manifest.json", "config.json", "rank_00.safetensors"):
        (folder / name).write_text("second one")
    (folder / "tokenizer.json").unlink()
    push(folder)
    assert steps == [
        f"write_object {INCOMPLETE}",
        "remove_object manifest.json",
        "remove_object config.json",
        "upload rank_00.safetensors",
        "upload config.json",
        "upload manifest.json",
        "remove_object tokenizer.json",
        f"remove_object {INCOMPLETE}",
    ]


def test_a_checkpoint_is_replaced_without_its_state(memory_bucket, steps):
    url = f"{memory_bucket}/run"
    folder = find_work(url)
    checkpoint = folder / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    for name in ("trainer_state.json", "rank_00.safetensors"):
        (checkpoint / name).write_text("first")
    push(folder, at_once=False)
    assert steps == ["upload rank_00.safetensors", "upload trainer_state.json"]
    steps.clear()
    (checkpoint / "trainer_state.json").write_text("amended alone")
    push(folder, at_once=False)
    assert steps == ["upload trainer_state.json"]
    steps.clear()
    for name in ("trainer_state.json", "rank_00.safetensors"):
        (checkpoint / name).write_text("second one")
    push(folder, at_once=False)
    assert steps == [
        "remove_object trainer_state.json",
        "upload rank_00.safetensors",
        "upload trainer_state.json",
    ]


def test_a_checkpoint_without_its_state_is_not_seen(memory_bucket):
    url = f"{memory_bucket}/run"
    write_object(f"{url}/checkpoints/step-000002/trainer_state.json", b"{}")
    write_object(f"{url}/checkpoints/step-000004/rank_00.safetensors", b"a part")
    folder = find_source(url)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]


def test_a_stand_in_that_was_renamed_is_not_sent(memory_bucket):
    url = f"{memory_bucket}/run"
    write_object(f"{url}/old.safetensors", b"weights")
    folder = find_work(url)
    pull(folder)
    assert not any((folder / "old.safetensors").read_bytes())
    (folder / "old.safetensors").rename(folder / "new.safetensors")
    push(folder, at_once=False)
    assert list_objects(url) == {}
    write_object(f"{url}/old.safetensors", b"weights")
    pull(folder)
    (folder / "old.safetensors").write_bytes(b"written")
    push(folder, at_once=False)
    assert read_object(f"{url}/old.safetensors") == b"written"
