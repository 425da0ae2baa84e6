"""Conversions that are killed at random moments and resumed.

`SHARDZOO_KILLS=50` kills each kind of conversion so often, and kinds that a test of every day leaves out.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from every_case import by_turns, every_day
from tiny_models import hf_model

from shardzoo.checkpoint.checkpoint import open_checkpoint
from shardzoo.convert import workers
from shardzoo.convert.operations import Options, merge, split
from shardzoo.convert.plan import plan_conversion
from shardzoo.convert.target import build_huggingface_target, build_shards_target

KILLS = int(os.environ.get("SHARDZOO_KILLS", "0"))
KINDS = every_day(["merge"], more=["split", "reshard"])
if KILLS:
    KINDS = ["split", "merge", "reshard", "legacy", "megatron", "from megatron", "dcp", "from dcp"]
    KINDS += ["split experts", "merge experts", "reshard experts"]
    KINDS += ["split stacked experts", "merge stacked experts", "reshard stacked experts"]
# Of each kind, killed one, two or three times in turn before they are resumed.
ATTEMPTS = KILLS // 2 + 1 if KILLS else 2


def operation_of(kind: str) -> str:
    """What is done, without the model that it is done to."""
    return kind.removesuffix(" experts").removesuffix(" stacked")


def convert(kind: str, source: Path, destination: Path, resume: bool) -> None:
    """Runs in a process of its own, in small blocks, so that there is something to interrupt."""
    workers.MEMORY = 1 << 20
    options = Options(resume=resume, jobs=2, largest_file=500_000)
    if operation_of(kind) in ("merge", "dcp") or kind.startswith("from"):
        merge(source, destination, options, style="dcp" if kind == "dcp" else "hf")
    else:
        split(
            source,
            destination,
            4,
            options,
            style=kind if kind in ("legacy", "megatron") else "shardzoo",
        )


@pytest.fixture(scope="module")
def model(zoo, tmp_path_factory) -> Path:
    """Several megabytes."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    return zoo.make(
        folder, "gpt2", heads=8, head_size=16, feed_forward=512, layers=8, vocabulary=3000
    )


SIZES = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 1000}


@pytest.fixture(scope="module")
def stacked(tmp_path_factory) -> Path:
    """A gpt-oss of several megabytes, with the experts of a layer in one tensor each."""
    folder = tmp_path_factory.mktemp("stacked") / "hf"
    hf_model("GptOssForCausalLM", **SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A Mixtral of several megabytes, with a tensor for each matrix of each expert."""
    folder = tmp_path_factory.mktemp("experts") / "hf"
    hf_model("MixtralForCausalLM", **SIZES).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(kind, fork_server, request, tmp_path, file_tree):
    name = "model"
    if kind.endswith("experts"):
        name = "stacked" if "stacked" in kind else "experts"
    model = request.getfixturevalue(name)
    source = model
    if kind == "from dcp":
        merge(model, source := tmp_path / "two", style="dcp")
    elif operation_of(kind) in ("reshard", "merge", "from megatron"):
        split(
            model,
            source := tmp_path / "two",
            2,
            style="megatron" if kind == "from megatron" else "shardzoo",
        )
    reference = tmp_path / "reference"
    convert(kind, source, reference, resume=False)
    wanted, before = file_tree(reference), file_tree(source)
    chosen, lines = random.Random(kind), len(wanted_copies(source, kind))
    interrupted = kept = 0
    for attempt in range(ATTEMPTS):
        destination = tmp_path / f"attempt-{attempt}"
        kills = 0
        while kills < 1 + attempt % 3:  # several in a row, too
            process = fork_server.Process(
                target=convert, args=(kind, source, destination, kills > 0)
            )
            process.start()
            wait_for(
                chosen, process, tmp_path / f".{destination.name}.partial" / ".journal.jsonl", lines
            )
            process.kill()
            process.join()
            kills += 1
            interrupted += not destination.exists()
            assert_nothing_incomplete_loads(destination, wanted, file_tree)
        journal = tmp_path / f".attempt-{attempt}.partial" / ".journal.jsonl"
        kept += journal.exists() and journal.read_bytes().count(b"\n") > 2
        process = fork_server.Process(target=convert, args=(kind, source, destination, True))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert file_tree(destination) == wanted
        assert not (tmp_path / f".{destination.name}.partial").exists()
    assert interrupted > ATTEMPTS // 2, "most kills came too late to interrupt anything"
    assert kept, "no kill left anything to keep"
    assert file_tree(source) == before


def wait_for(chosen: random.Random, process, journal: Path, lines: int) -> None:
    """Until a random moment: at the start, while tensors are copied, or while the folder is completed.

    Moments are chosen by progress, so that a busy machine does not make all of them too late.
    """
    progress = chosen.uniform(-0.1, 1.2)
    while process.is_alive() and progress > 0:
        try:
            done = journal.read_bytes().count(b"\n")
        except FileNotFoundError:  # not begun, or just finished
            done = 0
        if done >= min(progress, 1) * lines:
            break
        time.sleep(0.0005)
    time.sleep(chosen.uniform(0, 0.02))


def wanted_copies(source: Path, kind: str) -> tuple:
    """The copies of the conversion, each of which is a line of the journal."""
    merged = operation_of(kind) in ("merge", "dcp") or kind.startswith("from")
    return plan_conversion(
        source,
        build_huggingface_target if merged else lambda mapped: build_shards_target(mapped, 4),
    ).copies


def assert_nothing_incomplete_loads(destination: Path, wanted: dict, file_tree) -> None:
    work = destination.parent / f".{destination.name}.partial"
    for folder in (destination, work):
        if not folder.exists():
            continue
        try:
            open_checkpoint(folder)
        except ValueError:
            continue
        complete = {
            name: digest for name, digest in file_tree(folder).items() if name != ".journal.jsonl"
        }
        assert complete == wanted, f"{folder} loads, but is not complete"


def interrupted_work(model: Path, destination: Path) -> Path:
    """The work folder of a split that stopped after some tensors."""

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        split(model, destination, 4, Options(jobs=1), stop)
    return destination.parent / f".{destination.name}.partial"


def test_resuming_keeps_what_is_intact(model, tmp_path, file_tree):
    work = interrupted_work(model, tmp_path / "four")
    assert not (work / "manifest.json").exists()
    assert {path.suffix for path in work.iterdir()} == {".partial", ".jsonl"}
    outcome = split(model, tmp_path / "four", 4, Options(resume=True))
    assert 0.5 * outcome.nbytes < outcome.kept < outcome.nbytes
    split(model, tmp_path / "fresh", 4)
    assert file_tree(tmp_path / "four") == file_tree(tmp_path / "fresh")


def test_resuming_checks_what_it_keeps(model, tmp_path, file_tree):
    work = interrupted_work(model, tmp_path / "four")
    for path in work.glob("*.partial"):
        content = bytearray(path.read_bytes())
        content[len(content) // 4] ^= 1
        path.write_bytes(content)
    split(model, tmp_path / "four", 4, Options(resume=True))
    split(model, tmp_path / "fresh", 4)
    assert file_tree(tmp_path / "four") == file_tree(tmp_path / "fresh")


@pytest.mark.parametrize(
    "damage", by_turns(["torn line", "garbage", "empty", "missing", "lost file", "cut file"], 2)
)
def test_resuming_from_a_damaged_work_folder(damage, model, tmp_path, file_tree):
    work = interrupted_work(model, tmp_path / "four")
    journal, rank = work / ".journal.jsonl", work / "rank_02.safetensors.partial"
    if damage == "torn line":
        journal.write_bytes(journal.read_bytes()[:-20])
    elif damage == "garbage":
        journal.write_bytes(journal.read_bytes() + b"\0\0\0\0 no JSON\n[1]\n")
    elif damage == "empty":
        journal.write_bytes(b"")
    elif damage == "missing":
        journal.unlink()
    elif damage == "lost file":
        rank.unlink()
    else:
        os.truncate(rank, 1000)
    split(model, tmp_path / "four", 4, Options(resume=True))
    split(model, tmp_path / "fresh", 4)
    assert file_tree(tmp_path / "four") == file_tree(tmp_path / "fresh")


@pytest.mark.parametrize("change", ["another size", "another type", "changed source"])
def test_other_work_is_not_resumed(change, zoo, tmp_path, file_tree):
    source = zoo.make(tmp_path / "hf", "gpt2")
    work = interrupted_work(source, tmp_path / "four")
    before = file_tree(work)
    if change == "changed source":
        os.utime(source / "model.safetensors", ns=(1, 1))
    options = Options(resume=True, dtype="F16" if change == "another type" else None)
    with pytest.raises(ValueError, match="start again with --overwrite"):
        split(source, tmp_path / "four", 2 if change == "another size" else 4, options)
    assert file_tree(work) == before
    split(source, tmp_path / "four", 4, Options(overwrite=True))
    assert not work.exists()


def test_resuming_what_is_complete(model, gpt2_folder, tmp_path, file_tree):
    split(model, tmp_path / "four", 4)
    before = file_tree(tmp_path / "four")
    outcome = split(model, tmp_path / "four", 4, Options(resume=True))
    assert outcome.kept == outcome.nbytes
    assert file_tree(tmp_path / "four") == before
    with pytest.raises(ValueError, match="of another conversion"):
        split(gpt2_folder, tmp_path / "four", 4, Options(resume=True))


def test_an_interrupted_replacement_goes_on(model, tmp_path, file_tree):
    """Killed between putting the old folder aside and giving the new one its name."""
    split(model, tmp_path / "four", 4)
    wanted = file_tree(tmp_path / "four")
    work = interrupted_work(model, tmp_path / "next")
    work.rename(tmp_path / ".four.partial")
    (tmp_path / "four").rename(tmp_path / ".four.replaced")
    split(model, tmp_path / "four", 4, Options(resume=True))
    assert file_tree(tmp_path / "four") == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["four"]


def test_the_journal_says_what_is_done(model, tmp_path):
    work = interrupted_work(model, tmp_path / "four")
    lines = [json.loads(line) for line in (work / ".journal.jsonl").read_text().splitlines()]
    assert lines[0].keys() == {"fingerprint"}
    assert all(line.keys() == {"copy", "sha256"} for line in lines[1:])
    assert len({line["copy"] for line in lines[1:]}) == len(lines) - 1


def test_what_follows_a_torn_line_of_the_journal_counts(tmp_path):
    from shardzoo.convert.journal import JOURNAL, Journal

    journal = Journal(tmp_path, "a")
    journal.record(0, {(Path("x"), "t"): "0"})
    journal.close()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"copy": 1, "sha2')
    journal = Journal(tmp_path, "a")
    assert [*journal.finished] == [0]
    journal.record(2, {(Path("x"), "u"): "1"})
    journal.close()
    journal = Journal(tmp_path, "a")
    assert [*journal.finished] == [0, 2]
    journal.close()
