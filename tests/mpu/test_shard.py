"""`Shard` is pure arithmetic, so it is compared with index lists written out one by one."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardzoo.checkpoint.layout import ParameterSpec
from shardzoo.mpu import AxisSplit, Shard, divide


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
        narrow = st.sampled_from([n for n in range(1, widest + 1) if widest % n == 0])
        counts = [widest, *draw(st.lists(st.integers(size, widest), max_size=2))]
        served = [n for n in draw(st.lists(narrow, max_size=2)) if n < widest]
        shared = tuple(range(len(counts), len(counts) + len(served)))
        groups = tuple(unit * count for count in [*counts, *served])
        length = sum(groups)
        options = {"groups": groups, "unit": unit, "shared_kv_groups": shared}
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
    for number, group in enumerate(shard.groups):
        is_shared = number in shard.shared_kv_groups
        unit = 1 if is_shared and group // shard.unit % size else shard.unit
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
        assert 0 <= parts[0].shape[shard.dim] - len(rows) <= shard.unit * len(shard.groups)
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
    shared = (1,) if served > 1 else ()
    shard = Shard((sum(widths),), 0, widths, head_size, shared_kv_groups=shared)
    if served == 1:  # nothing is shared, and query and key-value heads are split alike
        assert all(
            shard.ranges(rank, size) == shard.compute_ranges(rank, size) for rank in range(size)
        )
    for rank in range(size):
        own, wanted = (shard.ranges(rank, size), shard.compute_ranges(rank, size))
        assert wanted[0] == own[0]
        heads = sorted({row // head_size // served for row in rows_in([own[0]])})
        assert [row - widths[0] for row in rows_in([wanted[1]])] == [
            head * head_size + i for head in heads for i in range(head_size)
        ]
        assert shard.compute_shape(rank, size) == (len(rows_in(wanted)),)
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
            shard.ranges(rank, size) == shard.compute_ranges(rank, size) for rank in range(size)
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
        ValueError, match=r"4 units of 64 rows .* cannot be split 5 ways; use 1 to 4 ranks"
    ):
        Shard((4 * 64, 8), 0, unit=64).local_shape(0, 5)


def test_grouped_queries():
    groups = (112, 16, 16)
    grouped = Shard((144, 16), 0, groups, unit=8, shared_kv_groups=(1, 2))
    assert grouped.ranges(1, 2) == [(56, 112), (120, 128), (136, 144)]
    assert not grouped.find_exchanged_groups(2)
    assert grouped.find_exchanged_groups(4) == [1, 2]
    assert [grouped.ranges(rank, 4)[1:] for rank in (0, 3)] == [
        [(112, 116), (128, 132)],
        [(124, 128), (140, 144)],
    ]
    assert [grouped.compute_ranges(rank, 4)[1] for rank in range(4)] == [(112, 120)] * 2 + [
        (120, 128)
    ] * 2
    assert grouped.largest_size == 14


def test_groups_are_shared_only_if_that_is_declared():
    """A router or the input of a state space beside a wide group is split like any other rows."""
    declared = Shard((10, 4), 0, groups=(8, 2), shared_kv_groups=(1,))
    assert [declared.ranges(rank, 4)[1] for rank in range(4)] == [(8, 9), (9, 9), (9, 10), (10, 10)]
    assert [declared.compute_ranges(rank, 4)[1] for rank in range(4)] == [(8, 9)] * 2 + [
        (9, 10)
    ] * 2
    plain = Shard((10, 4), 0, groups=(8, 2))
    assert plain.compute_ranges(1, 2) == plain.ranges(1, 2) == [(4, 8), (9, 10)]
    assert plain.find_exchanged_groups(3) == []
    with pytest.raises(
        ValueError, match=r"8 \+ 2 rows .* cannot be split 4 ways; use 1 to 2 ranks"
    ):
        plain.ranges(0, 4)


def cut_by_index(full, rows, dim):
    return full.index_select(dim, torch.tensor(rows, dtype=torch.long))


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_two_axes_split_two_dimensions(expert, tensor):
    """Stacked experts [E, F, H]: E over `expert`, two groups of F over `tensor`."""
    splits = (AxisSplit(1, groups=(6, 8), unit=2), AxisSplit(-3, axis="expert"))
    shard = Shard.from_splits((5, 14, 3), *splits, tied_to="other")
    full = torch.arange(5 * 14 * 3).view(5, 14, 3)
    sizes = {"expert": expert, "tensor": tensor, "data": 7}
    parts = []
    for ranks in itertools.product(range(expert), range(tensor)):
        place = dict(zip(("expert", "tensor"), ranks, strict=True))
        experts = [e for e in range(5) if holder(e, 5, expert) == ranks[0]]
        rows = [row for row in range(6) if holder(row // 2, 3, tensor) == ranks[1]]
        rows += [6 + row for row in range(8) if holder(row // 2, 4, tensor) == ranks[1]]
        part = shard.slice(full, place, sizes)
        assert part.is_contiguous()
        assert torch.equal(part, cut_by_index(cut_by_index(full, experts, 0), rows, 1))
        assert shard.local_shape(place, sizes) == part.shape == shard.compute_shape(place, sizes)
        assert rows_in(shard.ranges(place, sizes, dim=0)) == experts
        assert rows_in(shard.ranges(place, sizes, dim=1)) == rows
        assert shard.compute_ranges(place, sizes, dim=-2) == shard.ranges(place, sizes, dim=1)
        parts.append(part)
    assert torch.equal(shard.merge(parts, sizes), full)
    assert Shard.from_record(json.loads(json.dumps(shard.to_record()))) == shard
    with pytest.raises(ValueError, match=r"the parts are not those of one tensor"):
        shard.merge([*parts, *parts], sizes)


def test_padding_and_experts_together():
    shard = Shard.from_splits((2, 5), AxisSplit(0, axis="expert"), AxisSplit(1, pad_multiple=2))
    full = torch.arange(1, 11).view(2, 5)
    sizes = {"expert": 2, "tensor": 2}
    parts = [shard.slice(full, {"expert": e, "tensor": t}, sizes) for e in (0, 1) for t in (0, 1)]
    assert [part.tolist() for part in parts] == [
        [[1, 2, 3, 4]],
        [[5, 0, 0, 0]],
        [[6, 7, 8, 9]],
        [[10, 0, 0, 0]],
    ]
    assert torch.equal(shard.merge(parts, sizes), full)


def test_who_knows_the_tensor_axis_alone_is_refused():
    """A checkpoint or a converter asks with numbers; it must not split experts wrongly."""
    experts = Shard((4, 6), 0, axis="expert")
    both = Shard.from_splits((4, 6), AxisSplit(0, axis="expert"), AxisSplit(1))
    for shard, axes in ((experts, "expert"), (both, "expert and tensor")):
        message = f"is split over {axes}, which cannot be answered for the tensor axis alone"
        questions = (
            lambda shard: shard.dim,
            lambda shard: shard.groups,
            lambda shard: shard.pad_multiple,
            lambda shard: shard.largest_size,
            lambda shard: shard.without_padding(),
            lambda shard: shard.check(1),
            lambda shard: shard.check_even(2),
            lambda shard: shard.find_exchanged_groups(2),
            lambda shard: shard.local_shape(0, 2),
            lambda shard: shard.ranges(0, 2, dim=0),
            lambda shard: shard.compute_ranges(0, 2, dim=0),
            lambda shard: shard.slice(torch.zeros(4, 6), 0, 1),
            lambda shard: shard.merge([torch.zeros(4, 6)]),
            lambda shard: ParameterSpec("experts", shard.shape, shard),
        )
        for question in questions:
            with pytest.raises(ValueError, match=message):
                question(shard)
    with pytest.raises(ValueError, match=r"dim None of a tensor .* is not split; use 0 or 1"):
        both.ranges({"expert": 0, "tensor": 0}, {"expert": 1, "tensor": 1})
    with pytest.raises(ValueError, match=r"4 rows .* cannot be split 5 ways; use 1 to 4 ranks"):
        both.check({"expert": 5, "tensor": 1})
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        both.local_shape({"expert": 2, "tensor": 0}, {"expert": 2, "tensor": 1})


def test_records_of_manifests():
    """A split over the tensor axis is recorded as the release before did; its records still load."""
    grouped = Shard((144, 16), 0, (112, 16, 16), 8, shared_kv_groups=(1, 2))
    record = {
        "shape": [144, 16],
        "dim": 0,
        "groups": [112, 16, 16],
        "unit": 8,
        "pad_multiple": 0,
        "tied_to": None,
    }
    assert grouped.to_record() == record
    assert Shard.from_record(record) == grouped
    router = Shard((10, 4), 0, groups=(8, 2))
    assert router.to_record()["shared_kv_groups"] == []
    # No release took groups for shared that are narrower but do not divide the widest.
    uneven = {**record, "shape": [14, 4], "groups": [10, 4], "unit": 1}
    assert Shard.from_record(uneven) == Shard((14, 4), 0, groups=(10, 4))
    vocabulary = Shard((97, 12), 0, pad_multiple=8, tied_to="embedding")
    assert vocabulary.to_record()["groups"] == []
    for shard in (grouped, router, vocabulary, Shard((4, 6), -1, axis="expert")):
        assert Shard.from_record(json.loads(json.dumps(shard.to_record()))) == shard
    for damaged in ({}, {**record, "rows": 1}, {**record, "dim": 7}, {**record, "groups": [1]}):
        with pytest.raises((ValueError, TypeError)):
            Shard.from_record(damaged)


def test_shards_describe_themselves():
    assert Shard((144, 16), 0, (112, 16, 16), 8, shared_kv_groups=(1, 2)).describe() == (
        "144x16 split along 0 in blocks 112+16+16 with shared key-value heads in blocks 1, 2 "
        "in units of 8"
    )
    both = Shard.from_splits((4, 6), AxisSplit(1, pad_multiple=2), AxisSplit(0, axis="expert"))
    assert both.describe() == (
        "4x6 split along 0 over expert split along 1 padded to multiples of 2"
    )


def test_a_vocabulary_smaller_than_the_padding_leaves_ranks_empty():
    shard = Shard((5, 3), 0, pad_multiple=4)
    assert [shard.ranges(rank, 4) for rank in range(4)] == [[(0, 4)], [(4, 5)], [(5, 5)], [(5, 5)]]


def test_frozen_and_hashable():
    shard = Shard((4, 2), -1, tied_to="embedding.weight")
    assert (shard.dim, hash(shard)) == (1, hash(Shard((4, 2), 1, tied_to="embedding.weight")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.shape = (2, 4)  # type: ignore[misc]


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


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ((3,), r"shared_kv_groups \(3,\) must be numbers of groups \(8, 4, 3\)"),
        ((0,), "shared key-value group 0 of 8 rows must be narrower than the 8 rows"),
        ((1, 2), "shared key-value group 2 of 3 rows must be narrower .* and divide them"),
    ],
)
def test_impossible_key_value_groups_are_refused(shared, message):
    with pytest.raises(ValueError, match=message):
        Shard((15, 2), 0, (8, 4, 3), shared_kv_groups=shared)


@pytest.mark.parametrize(
    "splits",
    [
        (),
        (AxisSplit(0), AxisSplit(1)),
        (AxisSplit(0), AxisSplit(0, axis="expert")),
        (AxisSplit(1), AxisSplit(-1, axis="expert")),
    ],
)
def test_impossible_pairs_of_splits_are_refused(splits):
    with pytest.raises(
        ValueError, match="needs splits of different dimensions over different axes"
    ):
        Shard.from_splits((4, 2), *splits)


def test_an_axis_that_replicates_parameters_splits_none():
    with pytest.raises(ValueError, match="split over expert or tensor, not over 'data'"):
        Shard((4, 2), 0, axis="data")


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
