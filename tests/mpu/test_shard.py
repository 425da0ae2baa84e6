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
    """(shard, size): any rank of tensor, any dim, unequal groups, units, or vocabulary padding."""
    size, unit = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    others = draw(st.lists(st.integers(0, 3), max_size=2))
    dim = draw(st.integers(0, len(others)))
    if draw(st.booleans()):
        length, options = draw(st.integers(1, 40)), {"pad_multiple": draw(st.integers(1, 8))}
    else:
        groups = tuple(size * unit * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
        length, options = sum(groups), {"groups": groups, "unit": unit}
    shape = (*others[:dim], length, *others[dim:])
    return Shard(shape, dim - draw(st.sampled_from([0, len(shape)])), **options), size


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
        rows += range(start + group * rank // size, start + group * (rank + 1) // size)
        start += group
    return rows


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_slice_and_merge_are_exact_inverses(case, dtype):
    shard, size = case
    full = torch.arange(1, torch.Size(shard.shape).numel() + 1).view(shard.shape).to(dtype)
    full = full.transpose(0, -1).contiguous().transpose(0, -1)  # strides that are not the usual ones
    parts = [shard.slice(full, rank, size) for rank in range(size)]
    for rank, part in enumerate(parts):
        assert part.shape == shard.local_shape(size)
        assert part.is_contiguous()
        rows = rows_of(shard, rank, size)
        for local, row in enumerate(rows):
            expected = 0 if row is None else full.select(shard.dim, row)
            assert (part.select(shard.dim, local) == expected).all()
        assert [row for start, stop in shard.ranges(rank, size) for row in range(start, stop)] == [
            row for row in rows if row is not None
        ]
    merged = shard.merge(parts)
    assert merged.dtype == dtype
    assert torch.equal(merged, full)
    covered = sorted(row for rank in range(size) for row in rows_of(shard, rank, size) if row is not None)
    assert covered == list(range(shard.shape[shard.dim]))


@given(cases())
def test_legal_sizes_are_exactly_those_that_slice(case):
    shard, _ = case
    for size in range(1, 13):
        if all(block % (shard.unit * size) == 0 for block in shard.groups):
            assert shard.legal_sizes(12).count(size) == 1
            shard.local_shape(size)
        else:
            assert size not in shard.legal_sizes(12)
            with pytest.raises(ValueError, match=f"split {size} ways; use 1"):
                shard.local_shape(size)


def test_a_slice_does_not_keep_the_full_tensor_alive():
    full = torch.zeros(8, 2)
    assert Shard((8, 2), 0).slice(full, 0, 1).untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


def test_heads_are_not_cut():
    heads = Shard((6 * 64, 8), 0, unit=64)
    assert heads.local_shape(3) == (128, 8)
    with pytest.raises(ValueError, match=r"4 rows in units of 64 .* cannot be split 3 ways; use 1, 2 or 4"):
        Shard((4 * 64, 8), 0, unit=64).local_shape(3)


def test_unequal_groups_share_the_smallest_divisor():
    grouped = Shard((32 * 8 + 2 * 8 + 2 * 8, 16), 0, groups=(256, 16, 16), unit=8)
    assert grouped.legal_sizes(64) == [1, 2]
    assert grouped.ranges(1, 2) == [(128, 256), (264, 272), (280, 288)]


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
    with pytest.raises(ValueError, match=r"expected the full tensor of shape \(4, 2\), got \(2, 4\)"):
        shard.slice(torch.zeros(2, 4), 0, 2)
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        shard.slice(torch.zeros(4, 2), 2, 2)
    with pytest.raises(ValueError, match=r"part 1 is torch\.float16"):
        shard.merge([torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float16)])
    with pytest.raises(ValueError, match=r"part 0 is .* \(3, 2\); expected .* \(2, 2\)"):
        shard.merge([torch.zeros(3, 2), torch.zeros(1, 2)])


def test_divide_names_the_sizes_that_work():
    assert divide(12, 4, "attention heads") == 3
    with pytest.raises(ValueError, match=r"12 attention heads cannot be split 5 ways; use 1, 2, 3, 4, 6 or 12"):
        divide(12, 5, "attention heads")
