"""Preparation: the same files with any number of workers, after any interruption."""

from __future__ import annotations

import errno
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardzoo.data import (
    IndexedDataset,
    PrepareOptions,
    fail_on_bad,
    iter_documents,
    load_tokenizer,
    prepare_dataset,
)
from shardzoo.data.text import prepare as prepare_module


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("shardzoo.data.text.sources.CHUNK_BYTES", 4096)


def test_documents_are_the_tokenizers_tokens_and_the_end(jsonl, texts, tokenizer_dir, tmp_path):
    report = prepare_dataset(jsonl, tmp_path / "a", PrepareOptions(tokenizer_dir))
    dataset = IndexedDataset(tmp_path / "a")
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_dir)
    expected = [[*reference(text).input_ids, reference.eos_token_id] for text in texts]
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == expected
    assert (report.documents, report.tokens) == (len(texts), dataset.num_tokens)
    assert dataset.dtype == np.uint16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.meta.json"]


def test_workers_do_not_change_the_files(jsonl, tokenizer_dir, tmp_path, small_chunks):
    for workers in (1, 2, 3):
        prepare_dataset(
            jsonl, tmp_path / str(workers), PrepareOptions(tokenizer_dir), workers=workers
        )
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")


@pytest.mark.parametrize("stop_after", [1, 5, 11])
def test_an_interrupted_run_goes_on_where_it_was(
    stop_after, jsonl, tokenizer_dir, tmp_path, small_chunks, monkeypatch
):
    options = PrepareOptions(tokenizer_dir)
    prepare_dataset(jsonl, tmp_path / "whole", options)
    monkeypatch.setattr(prepare_module, "SECONDS_BETWEEN_COMMITS", -1.0)

    def interrupt(report, done, total):
        assert total > 12
        if done == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(jsonl, tmp_path / "a", options, progress=interrupt)
    assert not Path(f"{tmp_path}/a.idx").exists()
    report = prepare_dataset(jsonl, tmp_path / "a", options)
    assert report.resumed_chunks == stop_after
    assert report.documents == 200
    assert files(tmp_path / "a") == files(tmp_path / "whole")
    assert not list(tmp_path.glob("a.*partial*")) + list(tmp_path.glob("a.progress*"))


def test_other_settings_or_resume_off_start_again(
    jsonl, tokenizer_dir, tmp_path, small_chunks, monkeypatch
):
    monkeypatch.setattr(prepare_module, "SECONDS_BETWEEN_COMMITS", -1.0)

    def interrupt(report, done, total):
        raise KeyboardInterrupt

    for change in ({"append_eos": False}, {}):
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset(
                jsonl,
                tmp_path / "a",
                PrepareOptions(tokenizer_dir),
                overwrite=True,
                progress=interrupt,
            )
        report = prepare_dataset(
            jsonl,
            tmp_path / "a",
            PrepareOptions(tokenizer_dir, **change),
            resume=bool(change),
            overwrite=True,
        )
        assert report.resumed_chunks == 0
        assert report.documents == 200


def test_a_finished_pair_is_not_replaced_by_other_text(tokenizer_dir, tmp_path):
    path, prefix = tmp_path / "x.jsonl", tmp_path / "a"
    path.write_text('{"text": "one"}\n')
    options = PrepareOptions(tokenizer_dir)
    prepare_dataset(path, prefix, options)
    before = files(prefix)
    prepare_dataset(path, prefix, options)
    path.write_text('{"text": "one two three"}\n')
    for changed in (options, PrepareOptions(tokenizer_dir, append_eos=False)):
        with pytest.raises(ValueError, match=r"a\.bin and \.idx exist already.*overwrite=True"):
            prepare_dataset(path, prefix, changed)
    assert files(prefix) == before
    prepare_dataset(path, prefix, options, overwrite=True)
    assert files(prefix) != before
    # A pair without a record may be another tool's.
    Path(f"{prefix}.meta.json").unlink()
    with pytest.raises(ValueError, match="exist already"):
        prepare_dataset(path, prefix, options)


def test_a_run_between_does_not_lend_its_tokens(
    jsonl, tokenizer_dir, tmp_path, small_chunks, monkeypatch
):
    options = PrepareOptions(tokenizer_dir)
    prepare_dataset(jsonl, tmp_path / "whole", options)
    monkeypatch.setattr(prepare_module, "SECONDS_BETWEEN_COMMITS", -1.0)

    def interrupt(report, done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(jsonl, tmp_path / "a", options, progress=interrupt)
    journal = (tmp_path / "a.progress.json").read_text()

    # Another run writes more tokens to the same place, and is stopped before its first commit.
    monkeypatch.setattr(prepare_module, "SECONDS_BETWEEN_COMMITS", 1e9)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed(jsonl.read_text().splitlines(keepends=True))) * 2)

    def interrupt_late(report, done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(other, tmp_path / "a", options, progress=interrupt_late)
    assert json.loads((tmp_path / "a.progress.json").read_text())["chunks"] == 0

    # Even with the first one's journal, as after a crash at the wrong moment.
    (tmp_path / "a.progress.json").write_text(journal)
    with pytest.raises(ValueError, match="start again without resuming"):
        prepare_dataset(jsonl, tmp_path / "a", options)
    (tmp_path / "a.progress.json").unlink()
    assert prepare_dataset(jsonl, tmp_path / "a", options).resumed_chunks == 0
    assert files(tmp_path / "a") == files(tmp_path / "whole")


SLOW_RUN = """
import sys, time
from shardzoo.data import PrepareOptions, prepare_dataset
from shardzoo.data.text import sources
import shardzoo.data.text.prepare as prepare
sources.CHUNK_BYTES = 4096
prepare.SECONDS_BETWEEN_COMMITS = -1.0
prepare_dataset(sys.argv[1], sys.argv[2], PrepareOptions(sys.argv[3]), progress=lambda *_: time.sleep(0.05))
"""


def test_a_killed_run_goes_on(jsonl, tokenizer_dir, tmp_path, small_chunks):
    command = [sys.executable, "-c", SLOW_RUN, str(jsonl), str(tmp_path / "a"), str(tokenizer_dir)]
    process = subprocess.Popen(command)
    journal = tmp_path / "a.progress.json"
    deadline = time.monotonic() + 60
    while not (journal.exists() and json.loads(journal.read_text())["chunks"] >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    report = prepare_dataset(jsonl, tmp_path / "a", PrepareOptions(tokenizer_dir))
    prepare_dataset(jsonl, tmp_path / "whole", PrepareOptions(tokenizer_dir))
    assert report.resumed_chunks >= 3
    assert files(tmp_path / "a") == files(tmp_path / "whole")


def test_sentences_become_sequences(jsonl, texts, tokenizer_dir, tmp_path):
    prepare_dataset(
        jsonl, tmp_path / "a", PrepareOptions(tokenizer_dir, split_sentences=True, append_eos=False)
    )
    dataset = IndexedDataset(tmp_path / "a")
    tokenizer = load_tokenizer(tokenizer_dir)
    assert len(dataset) > 3 * dataset.num_documents
    assert [tokenizer.decode(dataset.document(i).tolist()) for i in range(len(texts))] == texts
    assert tokenizer.decode(dataset[0].tolist()) == "Document 0."


def test_bad_records_are_counted_and_named_or_fatal(tokenizer_dir, tmp_path):
    lines = [json.dumps({"text": f"text {i}"}) for i in range(30)]
    lines[7], lines[20], lines[22] = "{", '{"text": 1}', ""
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines))
    report = prepare_dataset(path, tmp_path / "a", PrepareOptions(tokenizer_dir))
    assert (report.documents, report.bad, report.empty) == (27, 2, 1)
    assert [line.split(":")[0] for line in report.first_bad] == [
        f"{path}, record 8",
        f"{path}, record 21",
    ]
    with pytest.raises(ValueError, match=r"x\.jsonl, record 8: not JSON"):
        prepare_dataset(path, tmp_path / "b", PrepareOptions(tokenizer_dir), on_bad=fail_on_bad)
    assert not Path(f"{tmp_path}/b.idx").exists()


def test_a_source_without_documents_writes_nothing(tokenizer_dir, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": " "}\n{}\n')
    with pytest.raises(
        ValueError, match=r"holds no document with text; the first bad record: .*record 2"
    ):
        prepare_dataset(tmp_path / "x.jsonl", tmp_path / "a", PrepareOptions(tokenizer_dir))
    assert not Path(f"{tmp_path}/a.idx").exists()


def test_mistakes_are_named_before_work_begins(jsonl, tokenizer_dir, tmp_path):
    for change, reason in [
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"options": PrepareOptions(tmp_path / "nothing")}, "does not exist"),
        ({"options": PrepareOptions(tokenizer_dir, eos_token="[SEP]")}, "no token '\\[SEP\\]'"),
    ]:
        arguments = {"options": PrepareOptions(tokenizer_dir), **change}
        with pytest.raises(ValueError, match=reason):
            prepare_dataset(jsonl, tmp_path / "a", **arguments)
    assert not list(tmp_path.iterdir())


def test_a_killed_worker_is_an_error_and_not_a_hang(jsonl, tokenizer_dir, tmp_path, small_chunks):
    others = set(multiprocessing.active_children())  # of other tests

    def kill(report, done, total):
        for child in set(multiprocessing.active_children()) - others:
            child.kill()

    with pytest.raises(RuntimeError, match="worker process died"):
        prepare_dataset(
            jsonl, tmp_path / "a", PrepareOptions(tokenizer_dir), workers=2, progress=kill
        )
    prepare_dataset(jsonl, tmp_path / "a", PrepareOptions(tokenizer_dir), workers=2)
    assert IndexedDataset(tmp_path / "a").num_documents == 200


def test_text_that_spells_a_special_token_stays_text(tokenizer_dir, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a <|endoftext|> b"}) + "\n")
    prepare_dataset(path, tmp_path / "a", PrepareOptions(tokenizer_dir))
    tokens = IndexedDataset(tmp_path / "a").document(0).tolist()
    assert tokens.count(0) == 1
    assert load_tokenizer(tokenizer_dir).decode(tokens[:-1]) == next(iter_documents(path))


PARALLEL_RUN = """
import sys
from shardzoo.data import PrepareOptions, prepare_dataset
import multiprocessing
def show(report, done, total):
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
if __name__ == "__main__":
    prepare_dataset([sys.argv[1]] * 2000, sys.argv[2], PrepareOptions(sys.argv[3]), workers=2, progress=show)
"""


def test_workers_end_with_a_killed_parent(jsonl, tokenizer_dir, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(PARALLEL_RUN)
    command = [sys.executable, str(script), str(jsonl), str(tmp_path / "a"), str(tokenizer_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


FULL_DISK = """
import resource, sys
from shardzoo.data import PrepareOptions, prepare_dataset
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    prepare_dataset([sys.argv[1]] * 20, sys.argv[2], PrepareOptions(sys.argv[3]))
except OSError as error:
    sys.exit(error.errno)
"""


def test_a_full_disk_is_its_own_error_and_leaves_no_dataset(jsonl, tokenizer_dir, tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(jsonl), str(tmp_path / "a"), str(tokenizer_dir)]
    assert subprocess.run(command, check=False).returncode == errno.EFBIG
    assert not Path(f"{tmp_path}/a.idx").exists()
    assert not Path(f"{tmp_path}/a.bin").exists()
    prepare_dataset([jsonl] * 20, tmp_path / "a", PrepareOptions(tokenizer_dir))
    assert IndexedDataset(tmp_path / "a").num_documents == 4000
