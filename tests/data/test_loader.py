"""Batches are a function of (seed, consumed samples), whatever the ranks, workers and stops."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from every_case import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardzoo.data import EpochShuffle, GPTDataset, PadBatch, ResumableLoader, Share

fuzz = settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Numbers:
    """Sample n is n, of a length that differs."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        values = np.full(index % 3 + 1, index)
        return {"input_ids": values, "labels": values}


def real(batch) -> list[int]:
    """Numbers of the samples that count."""
    return [int(row[0]) for row in batch["labels"] if row[0] != -100]


def steps(total_batch, world, workers=0, consumed=0, count=4, **options) -> list[list[int]]:
    """Sample numbers of `count` global batches, ranks in order."""
    loaders = [
        iter(ResumableLoader(Numbers(), Share(total_batch // world, r, world), consumed=consumed,
                             num_workers=workers, **options))
        for r in range(world)
    ]  # fmt: skip
    return [[n for loader in loaders for n in real(next(loader))] for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_and_workers_give_the_same_global_batches(world, workers):
    assert steps(4, world, workers) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


@fuzz
@given(stop=st.integers(0, 20), first=st.sampled_from([1, 2, 4]), second=st.sampled_from([1, 2, 4]))
def test_stopping_anywhere_and_resuming_with_other_ranks(stop, first, second):
    seen: list[int] = []
    loaders = [ResumableLoader(Numbers(), Share(4 // first, r, first)) for r in range(first)]
    running = [iter(loader) for loader in loaders]
    for _ in range(stop):
        seen += [n for loader in running for n in real(next(loader))]
    states = {tuple(loader.state_dict().items()) for loader in loaders}
    assert len(states) == 1
    resumed = [ResumableLoader(Numbers(), Share(4 // second, r, second)) for r in range(second)]
    for loader in resumed:
        loader.load_state_dict(dict(states.copy().pop()))
    running = [iter(loader) for loader in resumed]
    for _ in range(5):
        seen += [n for loader in running for n in real(next(loader))]
    assert seen == list(range(4 * (stop + 5)))


class Drawing:
    """Samples that are drawn from the generators of their process."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        return {"input_ids": np.array([index]), "drawn": np.array(drawn)}


def test_what_workers_draw_follows_from_seed_and_sample():
    def drawn(seed=1, workers=2, consumed=0, share=Share(2)):  # noqa: B008 - it is frozen
        loader = ResumableLoader(
            Drawing(), share, num_workers=workers, consumed=consumed, seed=seed
        )
        return torch.cat([batch["drawn"] for batch in islice(loader, 4)])

    whole = drawn()
    assert len(whole.unique()) == whole.numel()
    assert torch.equal(drawn(workers=1), whole)
    assert torch.equal(drawn(consumed=4)[:4], whole[4:])
    assert torch.equal(
        torch.stack([drawn(share=Share(1, rank, 2)) for rank in range(2)], 1).flatten(0, 1), whole
    )
    assert not torch.equal(drawn(seed=2), whole)


def test_prefetched_batches_do_not_count():
    loader = ResumableLoader(Numbers(), Share(2), num_workers=2)
    batches = iter(loader)
    for expected in (2, 4, 6):
        next(batches)
        assert loader.state_dict() == {"consumed_samples": expected}


@fuzz
@given(total=st.integers(1, 23), world=st.sampled_from([1, 2, 4]), size=st.integers(1, 3))
def test_no_rank_ends_before_another(total, world, size):
    for last in ("drop", "pad"):
        ranks = [
            list(ResumableLoader(Numbers(), Share(size, r, world), total=total, last=last))
            for r in range(world)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        assert all(len(batch["labels"]) == size for batches in ranks for batch in batches)
        counts = Counter(n for batches in ranks for batch in batches for n in real(batch))
        kept = total if last == "pad" else total // (size * world) * (size * world)
        assert counts == Counter(range(kept))


def test_gpt_batches_are_those_of_the_dataset(write_dataset):
    dataset = GPTDataset(write_dataset([list(range(1, 200))] * 3), 16, seed=2)
    batches = iter(ResumableLoader(dataset, Share(2, 1, 2), consumed=8, num_workers=2))
    first, second = next(batches), next(batches)
    assert first["input_ids"].tolist() == [
        dataset[10]["input_ids"].tolist(),
        dataset[11]["input_ids"].tolist(),
    ]
    assert second["labels"].tolist() == [
        dataset[14]["labels"].tolist(),
        dataset[15]["labels"].tolist(),
    ]


def test_epochs_are_shuffled_anew_and_complete():
    order = EpochShuffle(10, seed=1)
    epochs = [[order(10 * epoch + i) for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert steps(5, 1, order=order, count=2)[1] == epochs[0][5:]


def test_padding_fills_with_what_counts_nothing():
    rows = [([5, 6], [7], [[0, 1], [2, 3]]), ([5], [7, 8, 9], [[0], [2]])]
    names = ("input_ids", "labels", "position_ids")
    samples = [dict(zip(names, map(np.array, row), strict=True)) for row in rows]
    batch = PadBatch(pad_token_id=4, multiple_of=4)(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 4, 4], [5, 4, 4, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[7, -100, -100, -100], [7, 8, 9, -100]]
    assert batch["position_ids"].tolist() == [
        [[0, 1, 0, 0], [2, 3, 0, 0]],
        [[0, 0, 0, 0], [2, 0, 0, 0]],
    ]
    assert all(str(tensor.dtype) == "torch.int64" for tensor in batch.values())
    fixed = PadBatch(lengths={"input_ids": 3, "labels": 5})(samples)
    assert (fixed["input_ids"].shape, fixed["labels"].shape) == ((2, 3), (2, 5))
    own = PadBatch()([{"input_ids": np.array([1]), "attention_mask": np.array(1)}] * 2)
    assert own["attention_mask"].tolist() == [1, 1]  # GLM's own mask is kept


def test_rows_of_different_types_keep_their_values():
    batch = PadBatch()(
        [{"x": np.array([1, 2]), "labels": []}, {"x": np.array([0.5, 0.7, 0.9]), "labels": [3]}]
    )
    assert batch["x"].tolist() == [[1, 2, 0], [0.5, 0.7, 0.9]]
    assert batch["labels"].tolist() == [[-100], [3]]
    assert batch["labels"].dtype == torch.int64
    assert "attention_mask" not in batch


def test_the_mask_is_that_of_the_last_dimension():
    batch = PadBatch()([{"input_ids": [[5, 6, 7]] * 2}, {"input_ids": [[5], [6]]}])
    assert batch["attention_mask"].tolist() == [[[1, 1, 1]] * 2, [[1, 0, 0]] * 2]


def test_mistakes_are_named():
    for samples in ([{"x": [1], "y": [2]}, {"x": [1]}], [{"x": [1]}, {"x": [1], "y": [2]}]):
        with pytest.raises(
            ValueError, match=r"sample [01] of a batch \(from 0\) has no 'y', which sample [01] has"
        ):
            PadBatch()(samples)
    with pytest.raises(
        ValueError, match=r"'x' has shape \(1, 2\) in the first sample .* and \(2, 2\) in sample 1"
    ):
        PadBatch()([{"x": [[1, 2]]}, {"x": [[1, 2]] * 2}])
    with pytest.raises(ValueError, match="more than the fixed length 1"):
        PadBatch(lengths={"input_ids": 1})([Numbers()[1]])
    with pytest.raises(ValueError, match="at least one sample"):
        PadBatch()([])
    with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
        Share(1, 2, 2)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        Share(0)
    with pytest.raises(ValueError, match="consumed samples are -1"):
        next(iter(ResumableLoader(Numbers(), Share(1), consumed=-1)))
    with pytest.raises(ValueError, match="a position in a stream; a loader"):
        ResumableLoader(Numbers(), Share(1)).load_state_dict(
            {"consumed_samples": 1, "bookmark": {}}
        )
    with pytest.raises(ValueError, match="no samples"):
        next(iter(ResumableLoader(Numbers(), Share(1), total=0)))
