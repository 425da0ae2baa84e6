"""The `.bin/.idx` format against megatron-core's own implementation."""

from __future__ import annotations

import fcntl
import pickle
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from every_case import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.data import (
    IndexedDataset,
    IndexedDatasetWriter,
    WriterState,
    dtype_for_vocabulary,
    merge_datasets,
    split_dataset,
)

tmp_is_fresh_enough = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
document = st.lists(st.lists(st.integers(0, 60000), max_size=12), min_size=1, max_size=4)
DTYPES = [np.uint16, np.int32]


def write_both(documents: list, dtype: type, folder: Path) -> tuple[Path, Path]:
    import torch
    from megatron.core.datasets import indexed_dataset as megatron

    ours, theirs = folder / "ours", folder / "theirs"
    with IndexedDatasetWriter(ours, dtype) as writer:
        for sequences in documents:
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()
    builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{theirs}.idx")
    return ours, theirs


@tmp_is_fresh_enough
@given(documents=st.lists(document, min_size=1, max_size=8), dtype=st.sampled_from(DTYPES))
def test_files_are_byte_identical_to_megatrons(documents, dtype, tmp_path):
    ours, theirs = write_both(documents, dtype, tmp_path)
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


@tmp_is_fresh_enough
@given(documents=st.lists(document, min_size=1, max_size=8), dtype=st.sampled_from(DTYPES))
def test_each_reads_what_the_other_wrote(documents, dtype, tmp_path):
    from megatron.core.datasets import indexed_dataset as megatron

    ours, theirs = write_both(documents, dtype, tmp_path)
    sequences = [sequence for sequences in documents for sequence in sequences]
    mine = IndexedDataset(theirs)
    assert [mine[i].tolist() for i in range(len(mine))] == sequences
    assert mine.dtype == dtype
    assert [mine.document(i).tolist() for i in range(mine.num_documents)] == [
        list(chain(*d)) for d in documents
    ]
    if sum(map(len, sequences)):  # megatron-core cannot map an empty .bin
        other = megatron.IndexedDataset(str(ours))
        assert [other[i].tolist() for i in range(len(other))] == sequences
        assert other.document_indices.tolist() == mine.document_indices.tolist()


@pytest.mark.parametrize(
    ("vocabulary", "expected"), [(65499, np.uint16), (65500, np.int32), (250112, np.int32)]
)
def test_token_type_follows_megatrons_choice(vocabulary, expected):
    from megatron.core.datasets import indexed_dataset as megatron

    assert dtype_for_vocabulary(vocabulary) == expected
    assert dtype_for_vocabulary(vocabulary) == megatron.DType.optimal_dtype(vocabulary)


def test_tokens_that_do_not_fit_are_refused_not_wrapped(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_sequence([65535])
        for bad in ([65536], [-1]):
            with pytest.raises(ValueError, match="do not fit uint16"):
                writer.add_sequence(bad)
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [65535]


def test_bulk_and_single_writes_give_the_same_files(tmp_path):
    lengths = np.array([3, 0, 5, 1])
    tokens = np.arange(9)
    with IndexedDatasetWriter(tmp_path / "bulk", np.int32) as writer:
        writer.add_documents(tokens, lengths)
        writer.add_sequences(tokens, lengths)
        writer.end_documents(np.array([3, 1]))
    with IndexedDatasetWriter(tmp_path / "single", np.int32) as writer:
        for grouping in ([1, 1, 1, 1], [3, 1]):
            parts = iter(np.split(tokens, np.cumsum(lengths)[:-1]))
            for sequences in grouping:
                for _ in range(sequences):
                    writer.add_sequence(next(parts))
                writer.end_document()
    for suffix in (".bin", ".idx"):
        assert (
            Path(f"{tmp_path}/bulk{suffix}").read_bytes()
            == Path(f"{tmp_path}/single{suffix}").read_bytes()
        )


def test_an_error_leaves_the_old_dataset_and_no_rubbish(tmp_path):
    prefix = tmp_path / "corpus.v1"
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add_sequence([1, 2])

    def fail():
        with IndexedDatasetWriter(prefix, np.int32) as writer:
            writer.add_sequence([3])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert IndexedDataset(prefix)[0].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.v1.bin", "corpus.v1.idx"]


def test_resuming_cuts_off_what_was_not_committed(tmp_path):
    def interrupted() -> WriterState:
        with IndexedDatasetWriter(tmp_path / "a", np.int32, keep_partial=True) as writer:
            writer.add_documents(np.arange(5), np.array([2, 3]))
            state = writer.commit()
            writer.add_documents(np.arange(100), np.array([100]))
            raise KeyboardInterrupt(state)

    with pytest.raises(KeyboardInterrupt) as stop:
        interrupted()
    with IndexedDatasetWriter(tmp_path / "a", np.int32, resume=stop.value.args[0]) as writer:
        writer.add_documents(np.array([7]), np.array([1]))
    dataset = IndexedDataset(tmp_path / "a")
    assert [dataset.document(i).tolist() for i in range(3)] == [[0, 1], [2, 3, 4], [7]]


def _interrupt_writer(prefix, tokens) -> WriterState:
    """Leaves the partial files of a run that was interrupted after a commit; returns its state."""
    writer = IndexedDatasetWriter(prefix, np.int32, keep_partial=True)
    writer.add_documents(tokens, np.array([len(tokens)]))
    state = writer.commit()
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    return state


def test_a_run_is_not_resumed_on_the_tokens_of_another_one(tmp_path):
    state = _interrupt_writer(tmp_path / "a", np.arange(50))
    other = _interrupt_writer(tmp_path / "a", np.arange(100, 200))
    with pytest.raises(ValueError, match="not of the run that is to be resumed"):
        IndexedDatasetWriter(tmp_path / "a", np.int32, resume=state)
    with IndexedDatasetWriter(tmp_path / "a", np.int32, resume=other):
        pass
    assert IndexedDataset(tmp_path / "a")[0].tolist() == list(range(100, 200))


def test_a_writer_that_waited_leaves_a_finished_dataset_alone(tmp_path, monkeypatch):
    first = IndexedDatasetWriter(tmp_path / "a", np.int32)
    first.add_documents(np.arange(5), np.array([5]))
    original = fcntl.flock

    def finish_and_lock(descriptor, how):
        monkeypatch.undo()
        first.__exit__(None, None, None)  # between the second one's opening and its locking
        original(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", finish_and_lock)
    with pytest.raises(ValueError, match="has ended just now"):
        IndexedDatasetWriter(tmp_path / "a", np.int32)
    assert IndexedDataset(tmp_path / "a")[0].tolist() == list(range(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_failed_writer_does_not_delete_the_next_ones_files(tmp_path, monkeypatch):
    first = IndexedDatasetWriter(tmp_path / "a", np.int32)
    files = dict(first._files)
    closed = []

    class Closing:
        def __init__(self, file):
            self.file = file

        def close(self):
            closed.append(sorted(path.name for path in tmp_path.iterdir()))
            self.file.close()

    first._files = {part: Closing(file) for part, file in files.items()}
    first.__exit__(ValueError, ValueError("stop"), None)
    assert closed == [[], [], []]


def test_two_writers_of_one_prefix_are_refused(tmp_path):
    with (
        IndexedDatasetWriter(tmp_path / "a", np.int32),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        IndexedDatasetWriter(tmp_path / "a", np.int32)


def test_merge_then_split_keeps_every_document(write_dataset, tmp_path):
    first = write_dataset([[[1, 2], [3]], [[4]]])
    second = write_dataset([[[5, 6, 7]], [[8], [9], [10]], [[11]]])
    merge_datasets([first.prefix, second.prefix], tmp_path / "merged")
    merged = IndexedDataset(tmp_path / "merged")
    expected = [[1, 2, 3], [4], [5, 6, 7], [8, 9, 10], [11]]
    assert [merged.document(i).tolist() for i in range(5)] == expected
    assert merged.sizes.tolist() == [2, 1, 1, 3, 1, 1, 1, 1]
    shares = {tmp_path / "x": 0.6, tmp_path / "y": 0.2, tmp_path / "z": 0.2}
    assert list(split_dataset(merged, shares, seed=3).values()) == [3, 1, 1]
    parts = [IndexedDataset(name) for name in shares]
    found = [part.document(i).tolist() for part in parts for i in range(part.num_documents)]
    assert sorted(found) == sorted(expected)
    again = {tmp_path / "x2": 0.6, tmp_path / "y2": 0.2, tmp_path / "z2": 0.2}
    split_dataset(merged, again, seed=3)
    for name in ("x", "y", "z"):
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / f"{name}2.bin").read_bytes()


def test_merging_different_types_and_bad_shares_are_refused(write_dataset, tmp_path):
    a, b = write_dataset([[1]], np.int32), write_dataset([[1]], np.uint16)
    with pytest.raises(ValueError, match="different token dtypes"):
        merge_datasets([a.prefix, b.prefix], tmp_path / "m")
    with pytest.raises(ValueError, match="sum to 1"):
        split_dataset(a, {tmp_path / "x": 0.5}, seed=0)
    with pytest.raises(ValueError, match="sum to 1"):
        split_dataset(a, {tmp_path / "x": float("nan"), tmp_path / "y": 1}, seed=0)
    with pytest.raises(ValueError, match="the seed is -1"):
        split_dataset(a, {tmp_path / "x": 1}, seed=-1)
    with pytest.raises(ValueError, match="fewer than the 2 parts"):
        split_dataset(a, {tmp_path / "x": 0.5, tmp_path / "y": 0.5}, seed=0)


def test_a_pickled_dataset_reopens_its_files(write_dataset):
    dataset = write_dataset([[1, 2], [3]])
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 500
    assert copy[0].tolist() == [1, 2]


@pytest.mark.parametrize("modes", [[0, 0, 0], [0, 1, 0]])
def test_modes_of_megatrons_multimodal_pairs(modes, tmp_path):
    import torch
    from megatron.core.datasets import indexed_dataset as megatron

    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/a.bin", dtype=np.int32, multimodal=True)
    for number, mode in enumerate(modes):
        builder.add_item(torch.tensor([number, 7]), mode)
    builder.end_document()
    builder.finalize(f"{tmp_path}/a.idx")
    if any(modes):
        with pytest.raises(
            ValueError, match=r"a.idx has sequences of Megatron-LM's modes other than 0"
        ):
            IndexedDataset(tmp_path / "a")
    else:
        assert IndexedDataset(tmp_path / "a").document(0).tolist() == [0, 7, 1, 7, 2, 7]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_every_type_of_token_that_megatron_writes(dtype, tmp_path):
    import torch
    from megatron.core.datasets import indexed_dataset as megatron

    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/a.bin", dtype=dtype)
    builder.add_document(torch.tensor([1, 2, 3, 100]), [3, 1])
    builder.finalize(f"{tmp_path}/a.idx")
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.dtype == dtype
    assert [dataset[i].tolist() for i in range(2)] == [[1, 2, 3], [100]]


def test_a_merge_that_lost_the_document_marks_is_named(tmp_path):
    """`merge_file_` of older Megatron-LM and NeMo adds the sizes, but not the marks, of the second file."""
    with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        for sequence in ([1, 2], [3], [4]):
            writer.add_documents(np.array(sequence), np.array([len(sequence)]))
    index = (tmp_path / "a.idx").read_bytes()
    marks = 4 * 8
    header = index[:26] + (2).to_bytes(8, "little")  # the marks 0 and 1 of the first file alone
    (tmp_path / "a.idx").write_bytes(header + index[34:-marks] + index[-marks:-16])
    with pytest.raises(
        ValueError, match=r"marks must run from 0 to the 3 sequences.*shardzoo data merge"
    ):
        IndexedDataset(tmp_path / "a")


def test_the_last_tokens_are_those_of_documents_with_tokens(write_dataset):
    dataset = write_dataset([[[1, 2], [3]], [], [[4], []], [[5]]])
    assert dataset.last_tokens().tolist() == [3, 4, 5]
    assert write_dataset([[]]).last_tokens().tolist() == []
