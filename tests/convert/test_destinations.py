"""Destinations that are in the way, too small, or belong to somebody else."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys

import pytest

from shardzoo.convert import destination, operations, workers
from shardzoo.convert.journal import JOURNAL, Journal


def test_one_that_exists(arena, gpt2_folder):
    arena.destination.mkdir()
    (arena.destination / "config.json").write_text("{}")
    assert "--overwrite" in arena.refused_split(gpt2_folder)


def test_one_that_exists_is_replaced_when_told(arena, gpt2_folder, gpt2_shards, file_tree):
    arena.destination.mkdir()
    (arena.destination / "config.json").write_text("{}")
    (arena.destination / "old").write_text("gone afterwards")
    assert arena.convert("split", gpt2_folder, arena.destination, "--tp", 2, "--overwrite")[0] == 0
    assert file_tree(arena.destination) == file_tree(gpt2_shards)
    assert sorted(path.name for path in arena.folder.iterdir()) == ["destination"]


def test_a_folder_that_is_no_model_is_never_replaced(arena, gpt2_folder):
    arena.destination.mkdir()
    (arena.destination / "thesis.tex").write_text("years of work")
    assert "holds no model" in arena.refused("split", gpt2_folder, arena.destination, "--overwrite")


def test_a_failed_replacement_leaves_the_old_one(arena, gpt2_folder, gpt2_shards):
    source = arena.copy(gpt2_folder)
    os.truncate(source / "model.safetensors", 1000)
    arena.destination.mkdir()
    (arena.destination / "config.json").write_text("{}")
    arena.refused("split", source, arena.destination, "--overwrite")


@pytest.mark.parametrize("place", ["source", "source/inner", "."])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_one_within_the_source(place, overwrite, arena, gpt2_folder):
    source = arena.copy(gpt2_folder)
    assert "neither inside the other" in arena.refused(
        "split", source, arena.folder / place, *overwrite
    )


def test_the_source_by_a_link(arena, gpt2_folder):
    source = arena.copy(gpt2_folder)
    (arena.folder / "link").symlink_to(source)
    assert "neither inside the other" in arena.refused(
        "split", source, arena.folder / "link", "--overwrite"
    )


def test_a_link_to_elsewhere(arena, gpt2_folder):
    (arena.folder / "elsewhere").mkdir()
    arena.destination.symlink_to("elsewhere")
    assert "is not a folder" in arena.refused_split(gpt2_folder)


def test_a_file(arena, gpt2_folder):
    arena.destination.write_text("")
    assert "is not a folder" in arena.refused_split(gpt2_folder)


def test_no_parent(arena, gpt2_folder):
    assert "does not exist" in arena.refused("split", gpt2_folder, arena.folder / "a" / "b")


def test_a_link_in_place_of_the_work_folder(arena, gpt2_folder):
    (arena.folder / "precious").mkdir()
    (arena.folder / ".destination.partial").symlink_to("precious")
    for flag in ([], ["--overwrite"], ["--resume"]):
        assert "the conversion needs that name" in arena.refused(
            "split", gpt2_folder, arena.destination, *flag
        )


def test_a_disk_that_is_known_to_be_too_small(arena, gpt2_folder, monkeypatch):
    real = os.statvfs(arena.folder)
    monkeypatch.setattr(
        destination.os, "statvfs", lambda path: os.statvfs_result([*real[:3], 0, 0, *real[5:]])
    )
    refusal = arena.refused_split(gpt2_folder)
    assert "has 0 free" in refusal


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_disk_that_fills_up(call, arena, gpt2_folder, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    assert "too full" in arena.refused_split(gpt2_folder)


def test_a_write_that_fails(arena, gpt2_folder, monkeypatch):
    real, calls = os.pwrite, []

    def fail_later(descriptor, data, offset):
        calls.append(offset)
        if len(calls) > 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail_later)
    refusal = arena.refused_split(gpt2_folder)
    assert "cannot write tensor" in refusal
    assert "rank_0" in refusal


@pytest.mark.before_release
def test_a_real_limit_on_file_sizes(arena, gpt2_folder):
    """The kernel itself refuses to let files grow."""
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))
from shardzoo.cli.convert import main
raise SystemExit(main(["split", {str(gpt2_folder)!r}, {str(arena.destination)!r}, "--tp", "2"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "too full" in done.stderr
    assert not list(arena.folder.iterdir())


def test_two_at_once(arena, gpt2_folder):
    work = arena.folder / ".destination.partial"
    work.mkdir()
    journal = Journal(work, "of another process")
    for flag in ("--resume", "--overwrite"):
        assert "another process" in arena.refused("split", gpt2_folder, arena.destination, flag)
    journal.close()


def test_leftovers_are_not_taken_over_silently(arena, gpt2_folder):
    (arena.folder / ".destination.partial").mkdir()
    assert "--resume" in arena.refused_split(gpt2_folder)


def test_both_at_once(arena, gpt2_folder):
    assert "one of them" in arena.refused(
        "split", gpt2_folder, arena.destination, "--resume", "--overwrite"
    )


def test_a_source_that_changes_meanwhile(arena, gpt2_folder, monkeypatch):
    source = arena.copy(gpt2_folder)
    path = source / "model.safetensors"
    original = workers.run_copy

    def touch_after(*arguments, **settings):
        os.utime(path, ns=(1, 1))
        return original(*arguments, **settings)

    monkeypatch.setattr(workers, "run_copy", touch_after)
    assert "changed while it was being read" in arena.refused_split(source)


def test_a_source_that_shrinks_meanwhile(arena, gpt2_folder, monkeypatch):
    source = arena.copy(gpt2_folder)
    original = operations._collect_texts

    def cut_after(*arguments):
        texts = original(*arguments)
        os.truncate(source / "model.safetensors", 4000)
        return texts

    monkeypatch.setattr(operations, "_collect_texts", cut_after)
    code, message = arena.convert("split", source, arena.destination)
    assert code == 2
    assert "changed while it was being read" in message
    assert sorted(path.name for path in arena.folder.iterdir()) == ["source"]


def test_a_journal_that_is_replaced_before_it_is_locked(tmp_path, monkeypatch):
    """Another process finishes its conversion, or begins it again, between opening and locking."""
    Journal(tmp_path, "first").close()
    original = fcntl.flock

    def replace_and_lock(file, how):
        (tmp_path / "new").write_bytes(b"")
        os.replace(tmp_path / "new", tmp_path / JOURNAL)
        original(file, how)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    with pytest.raises(ValueError, match="has ended or begun again"):
        Journal(tmp_path, "first")


def test_a_partial_file_with_another_header_is_written_anew(tmp_path):
    from shardzoo.checkpoint.planned_file import plan_safetensors_file
    from shardzoo.convert.destination import Destination

    destination = Destination(tmp_path / "out")
    file = plan_safetensors_file("a.safetensors", {"x": ("F32", (4,))})
    destination.begin([file], "same", overwrite=False).close()
    path = destination.partial(file.name)
    content = path.read_bytes()
    path.write_bytes(content[:9] + b"?" + content[10:])
    destination.begin([file], "same", overwrite=False).close()
    assert path.read_bytes() == content


def test_a_failure_between_two_names_brings_the_old_folder_back(tmp_path):
    """The old folder was set aside, and the new one could not get its name."""
    from shardzoo.convert.destination import Destination

    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "config.json").write_text("{}")
    Destination(tmp_path / "out").abandon()
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
