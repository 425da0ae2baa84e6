"""`Shard` is pure arithmetic, so it is compared with index lists written out one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardzoo.mpu import Shard, divide


@st.composite
def cases(draw):
    """(shard, size): any rank of tensor, any dim, equal or unequal groups, units, or vocabulary padding."""
    size, unit = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    others = draw(st.lists(st.integers(0, 3), max_size=2))
    dim = draw(st.integers(0, len(others)))
    if draw(st.booleans()):
        length, options = draw(st.integers(1, 40)), {"pad_multiple": draw(st.integers(1, 8))}
    else:
        widest = draw(st.integers(size, 14))  # in units
        served = st.sampled_from([n for n in range(1, widest + 1) if widest % n == 0])
        counts = [widest, *draw(st.lists(st.one_of(served, st.integers(size, widest)), max_size=3))]
        groups = tuple(unit * count for count in counts)
        length, options = sum(groups), {"groups": groups, "unit": unit}
    shape = (*others[:dim], length, *others[dim:])
    return Shard(shape, dim - draw(st.sampled_from([0, len(shape)])), **options), size


def holder(index, count, size):
    """The rank of an element that is at index / count of the way."""
    return next(rank for rank in range(size) if index * size < (rank + 1) * count)


def rows_of(shard, rank, size):
    """The rows of a rank, by counting; None for padding."""
    if shard.pad_multiple:
        width = 0
        while width * size < shard.shape[shard.dim] or width % shard.pad_multiple:
            width += 1
        rows = range(rank * width, (rank + 1) * width)
        return [row if row < shard.shape[shard.dim] else None for row in rows]
    rows, start = [], 0
    for group in shard.groups:
        is_served = group < max(shard.groups) and max(shard.groups) % group == 0
        unit = 1 if is_served and group // shard.unit % size else shard.unit
        rows += [
            start + row for row in range(group) if holder(row // unit, group // unit, size) == rank
        ]
        start += group
    return rows


def rows_in(ranges):
    return [row for start, stop in ranges for row in range(start, stop)]


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_slice_and_merge_are_exact_inverses(case, dtype):
    shard, size = case
    full = torch.arange(1, torch.Size(shard.shape).numel() + 1).view(shard.shape).to(dtype)
    full = (
        full.transpose(0, -1).contiguous().transpose(0, -1)
    )  # strides that are not the usual ones
    parts = [shard.slice(full, rank, size) for rank in range(size)]
    for rank, part in enumerate(parts):
        assert part.shape == shard.local_shape(rank, size)
        assert part.is_contiguous()
        rows = rows_of(shard, rank, size)
        assert 0 <= parts[0].shape[shard.dim] - len(rows) <= shard.unit * shard.blocks
        for local, row in enumerate(rows):
            expected = 0 if row is None else full.select(shard.dim, row)
            assert (part.select(shard.dim, local) == expected).all()
        assert rows_in(shard.ranges(rank, size)) == [row for row in rows if row is not None]
    merged = shard.merge(parts)
    assert merged.dtype == dtype
    assert torch.equal(merged, full)
    covered = sorted(
        row for rank in range(size) for row in rows_of(shard, rank, size) if row is not None
    )
    assert covered == list(range(shard.shape[shard.dim]))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 8))
def test_a_rank_has_the_key_value_heads_of_its_query_heads(head_size, key_values, served, size):
    queries = key_values * served
    size = min(size, queries)
    widths = (queries * head_size, key_values * head_size)
    shard = Shard((sum(widths),), 0, widths, head_size)
    for rank in range(size):
        own, wanted = (shard.ranges(rank, size), shard.needed_ranges(rank, size))
        assert wanted[0] == own[0]
        heads = sorted({row // head_size // served for row in rows_in([own[0]])})
        assert [row - widths[0] for row in rows_in([wanted[1]])] == [
            head * head_size + i for head in heads for i in range(head_size)
        ]
        assert shard.needed_shape(rank, size) == (len(rows_in(wanted)),)
        if size % key_values == 0:
            assert len(heads) == 1
        if key_values % size == 0:
            assert wanted == own


@given(cases())
def test_the_largest_size_is_the_last_that_slices(case):
    shard, _ = case
    for size in range(1, 20):
        if shard.largest_size is None or size <= shard.largest_size:
            for rank in range(size):
                assert 0 not in shard.local_shape(rank, size)[shard.dim : shard.dim + 1]
        else:
            with pytest.raises(
                ValueError, match=f"split {size} ways; use 1 to {shard.largest_size} ranks"
            ):
                shard.local_shape(0, size)


@given(cases(), st.integers(1, 12))
def test_even_parts_are_equal_and_whole(case, size):
    shard, _ = case
    if shard.pad_multiple:
        return
    if all(block % (shard.unit * size) == 0 for block in shard.groups):
        shard.check_even(size)
        assert len({shard.local_shape(rank, size) for rank in range(size)}) == 1
        assert all(
            shard.ranges(rank, size) == shard.needed_ranges(rank, size) for rank in range(size)
        )
    else:
        with pytest.raises(ValueError, match=f"split {size} ways evenly; use 1"):
            shard.check_even(size)


def test_a_slice_does_not_keep_the_full_tensor_alive():
    full = torch.zeros(8, 2)
    assert (
        Shard((8, 2), 0).slice(full, 0, 1).untyped_storage().data_ptr()
        != full.untyped_storage().data_ptr()
    )


def test_heads_are_not_cut():
    heads = Shard((25 * 64, 8), 0, unit=64)
    assert [heads.local_shape(rank, 4)[0] // 64 for rank in range(4)] == [7, 6, 6, 6]
    with pytest.raises(
        ValueError, match=r"4 rows in units of 64 .* cannot be split 5 ways; use 1 to 4 ranks"
    ):
        Shard((4 * 64, 8), 0, unit=64).local_shape(0, 5)


def test_grouped_queries():
    grouped = Shard((14 * 8 + 2 * 8 + 2 * 8, 16), 0, groups=(112, 16, 16), unit=8)
    assert grouped.ranges(1, 2) == [(56, 112), (120, 128), (136, 144)]
    assert not grouped.shared_blocks(2)
    assert grouped.shared_blocks(4) == [1, 2]
    assert [grouped.ranges(rank, 4)[1:] for rank in (0, 3)] == [
        [(112, 116), (128, 132)],
        [(124, 128), (140, 144)],
    ]
    assert [grouped.needed_ranges(rank, 4)[1] for rank in range(4)] == [(112, 120)] * 2 + [
        (120, 128)
    ] * 2
    assert grouped.largest_size == 14


def test_a_vocabulary_smaller_than_the_padding_leaves_ranks_empty():
    shard = Shard((5, 3), 0, pad_multiple=4)
    assert [shard.ranges(rank, 4) for rank in range(4)] == [[(0, 4)], [(4, 5)], [(5, 5)], [(5, 5)]]


def test_frozen_and_hashable():
    shard = Shard((4, 2), -1, tied_to="embedding.weight")
    assert (shard.dim, hash(shard)) == (1, hash(Shard((4, 2), 1, tied_to="embedding.weight")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.dim = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 2), 2), r"dim 2 is outside"),
        (((4, 2), 0, (3, 2)), r"groups \(3, 2\) must be > 0 and add up to 4"),
        (((4, 2), 0, (4, 0)), "must be > 0"),
        (((6, 2), 0, (), 4), "6 rows is not a whole number of units of 4"),
        (((6, 2), 0, (2, 4), 1, 8), "pad_multiple needs a single block"),
    ],
)
def test_impossible_declarations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shard(*arguments)


def test_wrong_tensors_are_refused():
    shard = Shard((4, 2), 0)
    with pytest.raises(
        ValueError, match=r"expected the full tensor of shape \(4, 2\), got \(2, 4\)"
    ):
        shard.slice(torch.zeros(2, 4), 0, 2)
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        shard.slice(torch.zeros(4, 2), 2, 2)
    with pytest.raises(ValueError, match=r"part 1 is torch\.float16"):
        shard.merge([torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float16)])
    with pytest.raises(ValueError, match=r"part 0 is .* \(3, 2\); expected .* \(2, 2\)"):
        shard.merge([torch.zeros(3, 2), torch.zeros(1, 2)])


def test_divide_names_the_sizes_that_work():
    assert divide(12, 4, "attention heads") == 3
    with pytest.raises(
        ValueError, match=r"12 attention heads cannot be split 5 ways; use 1, 2, 3, 4, 6 or 12"
    ):
        divide(12, 5, "attention heads")
