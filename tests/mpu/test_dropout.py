"""Dropout masks: the documented function, whatever the layout."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardzoo import mpu
from shardzoo.mpu import dropout

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mix64(z):
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M64
    return z ^ z >> 31


def chain(key, value):
    return mix64((key + 0x9E3779B97F4A7C15 * (value + 1)) & M64)


def element(row_key, column):
    h = (row_key + column) & M32
    h = ((h ^ h >> 16) * 0x21F0AAAD) & M32
    h ^= row_key >> 32
    h = ((h ^ h >> 15) * 0x735A2D97) & M32
    return h ^ h >> 15


def keys(*names, p=0.5, **options):
    """One Dropout per name, with its site."""
    layers = nn.ModuleDict({name: mpu.Dropout(p, **options) for name in names})
    mpu.assign_dropout_sites(layers)
    return layers


@given(
    seed=st.integers(0, 2**70),
    sample=st.integers(0, 2**40),
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    p=st.floats(0.01, 0.99),
    visit=st.integers(0, 2),
)
def test_mask_is_the_documented_function(seed, sample, shape, p, visit):
    """Against the same function in Python integers, written from the documentation."""
    layer = keys("site", p=p)["site"]
    mpu.dropout_state.set(seed, sample)
    for _ in range(visit + 1):
        actual = layer(torch.ones(shape)) != 0
    site = chain(chain(mix64(seed & M64), layer.site), visit)
    rows = math.prod(shape[1:-1])
    for b in range(shape[0]):
        for row in range(rows):
            row_key = chain(chain(site, sample + b), row)
            for column in range(shape[-1]):
                kept = element(row_key, column) >= round(p * 2**32)
                assert bool(actual.view(shape[0], rows, shape[-1])[b, row, column]) == kept


def attention_dropped(mesh, heads: int, queries: int, keys_: int, samples: int) -> torch.Tensor:
    """Which of a rank's attention probabilities are dropped, for all samples, as zeros."""
    layer = keys("site", p=0.4, mesh=mesh)["site"]
    mpu.dropout_state.set(5, 1000)
    return (
        mpu.scaled_masked_softmax(
            torch.zeros(samples, heads // mesh.tp_size, queries, keys_), dropout=layer
        )
        != 0
    )


def test_the_mask_of_attention_is_the_documented_function():
    layer = keys("site", p=0.3)["site"]
    mpu.dropout_state.set(7, 30)
    actual = mpu.scaled_masked_softmax(torch.zeros(2, 3, 4, 5), dropout=layer) != 0
    site = chain(chain(mix64(7), layer.site), 0)
    for b, head, query, key in itertools.product(range(2), range(3), range(4), range(5)):
        row_key = chain(chain(site, 30 + b), (head << 32) + query)
        assert bool(actual[b, head, query, key]) == (element(row_key, key) >= round(0.3 * 2**32))


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_mask_of_attention_depends_neither_on_padding_nor_on_the_split(tp, run_mesh):
    [whole] = run_mesh(1, attention_dropped, 6, 9, 11, 3)
    assert 0.3 < whole.float().mean() < 0.9
    for queries, keys_, samples in ((9, 11, 3), (17, 11, 3), (9, 30, 2), (64, 64, 3)):
        padded = torch.cat(run_mesh(tp, attention_dropped, 6, queries, keys_, samples), dim=1)
        assert torch.equal(padded[:, :, :9, :11], whole[:samples])


def test_sites_are_a_function_of_the_name_alone():
    """64 bits of blake2b; a change would change every resumed run."""
    assert keys("x")["x"].site == int.from_bytes(
        hashlib.blake2b(b"x", digest_size=8).digest(), "little"
    )
    stage = nn.ModuleDict({"0": mpu.Dropout(0.1)})
    mpu.assign_dropout_sites(stage, prefix="model.blocks")
    whole = nn.ModuleDict({"model": nn.ModuleDict({"blocks": stage})})
    site = stage["0"].site
    mpu.assign_dropout_sites(whole)
    assert stage["0"].site == site


def drop(mesh, whole, grad, split_dim):
    part = whole if split_dim is None else whole.chunk(mesh.tp_size, split_dim)[mesh.tp_rank]
    part_grad = grad if split_dim is None else grad.chunk(mesh.tp_size, split_dim)[mesh.tp_rank]
    layer = keys("site", p=0.3, split_dim=split_dim, mesh=mesh)["site"]
    mpu.dropout_state.set(5, 1000)
    x = part.clone().requires_grad_()
    output = layer(x)
    output.backward(part_grad)
    return output.detach(), x.grad


@pytest.mark.parametrize("split_dim", [None, 1, -1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_mask_does_not_depend_on_the_split(tp, split_dim, run_mesh):
    generator = torch.Generator().manual_seed(0)
    whole, grad = (torch.randn(3, 12, 24, 12, generator=generator) for _ in range(2))
    layer = keys("site", p=0.3)["site"]
    mpu.dropout_state.set(5, 1000)
    x = whole.clone().requires_grad_()
    expected = layer(x)
    expected.backward(grad)
    results = run_mesh(tp, drop, whole, grad, split_dim)
    if split_dim is None:
        assert all(torch.equal(output, expected.detach()) for output, _ in results)
    else:
        assert torch.equal(
            torch.cat([output for output, _ in results], split_dim), expected.detach()
        )
        assert torch.equal(torch.cat([x_grad for _, x_grad in results], split_dim), x.grad)
    assert torch.equal(expected.detach() != 0, x.grad != 0)
    kept = expected.detach() != 0
    torch.testing.assert_close(expected.detach()[kept], (whole / 0.7)[kept])


def test_micro_batches_of_any_size_see_the_same_samples():
    layer = keys("site")["site"]
    mpu.dropout_state.set(1, 40)
    whole = layer(torch.ones(6, 5, 7))
    parts = []
    for first, count in ((40, 1), (41, 2), (43, 3)):
        mpu.dropout_state.set(1, first)
        parts.append(layer(torch.ones(count, 5, 7)))
    assert torch.equal(torch.cat(parts), whole)


def test_the_rows_of_a_sample_have_masks_of_their_own_in_any_micro_batch():
    """A multiple choice has several rows for each sample."""
    layer = keys("site")["site"]

    def draw(first, count):
        mpu.dropout_state.set(1, first)
        with mpu.dropout_state.rows_per_sample(3):
            return layer(torch.ones(count * 3, 5, 7))

    whole = draw(40, 4)
    assert torch.equal(torch.cat([draw(40, 1), draw(41, 3)]), whole)
    assert len({row.numpy().tobytes() for row in whole}) == 12


def masks():
    """One mask for each of several keys that differ in one thing."""
    found = []
    layers = keys("blocks_0_dropout", "blocks_1_dropout", "blocks_10_dropout")
    for seed in (0, 1, 2**32, 2**63):
        for sample in (0, 1, 2**32):
            mpu.dropout_state.set(seed, sample)
            for layer in layers.values():
                found += [layer(torch.ones(2, 64, 64)) != 0 for _ in range(2)]
    return torch.stack(found)


def test_streams_do_not_collide():
    """Masks of different seeds, samples, sites and visits agree on half of their elements, as strangers do."""
    flat = (
        masks()[:, 0].flatten(1).float() * 2 - 1
    )  # [masks, 4096]; the second sample overlaps on purpose
    agreement = flat @ flat.T / flat.shape[1]
    agreement.fill_diagonal_(0)
    assert agreement.abs().max() < 6 / math.sqrt(flat.shape[1])  # 6 standard deviations


def test_rows_columns_and_shifts_are_uncorrelated():
    """Within one mask: no row is a shifted, permuted or repeated other."""
    mpu.dropout_state.set(3, 0)
    mask = (keys("site")["site"](torch.ones(1, 512, 512)) != 0)[0].float() * 2 - 1
    bound = 6 / math.sqrt(512)
    for other in (mask, mask.roll(1, 1), mask.flip(1), mask[:, torch.arange(512) ^ 1]):
        rows = mask @ other.T / 512
        rows.fill_diagonal_(0)
        assert rows.abs().max() < bound
    columns = mask.T @ mask / 512
    columns.fill_diagonal_(0)
    assert columns.abs().max() < bound


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_rate_and_mean(p):
    mpu.dropout_state.set(0, 0)
    n = 1 << 20
    output = keys("site", p=p)["site"](torch.ones(4, 256, 1024))
    deviation = math.sqrt(p * (1 - p) / n)
    assert abs(float((output == 0).float().mean()) - p) < 5 * deviation
    assert abs(float(output.mean()) - 1) < 5 * deviation / (1 - p)


def test_rows_and_columns_alone_can_be_split():
    with pytest.raises(ValueError, match="must be 1"):
        mpu.Dropout(0.1, split_dim=2)


def test_evaluation_and_zero_probability_are_the_identity():
    x = torch.ones(2, 3)
    assert mpu.Dropout(0.5).eval()(x) is x
    assert mpu.Dropout(0.0)(x) is x


def test_no_batch_and_half_precision():
    layer = keys("site")["site"]
    mpu.dropout_state.set(0, 0)
    assert layer(torch.ones(0, 4, 4)).shape == (0, 4, 4)
    mpu.dropout_state.set(0, 0)
    wide = layer(torch.ones(2, 4, 4))
    mpu.dropout_state.set(0, 0)
    assert torch.equal(layer(torch.ones(2, 4, 4, dtype=torch.bfloat16)).float(), wide)


class Counted(TorchDispatchMode):
    """Counts operators that compute; views do not."""

    computed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.computed += not any(result.alias_info for result in func._schema.returns)
        return func(*args, **(kwargs or {}))


def masks_of(layers, first, batch):
    """Masks of a pass in which the second of three sites runs twice."""
    mpu.dropout_state.set(3, first)
    return [layers[name](torch.ones(batch, 5, 7)) != 0 for name in ("a", "b", "b", "c")]


def test_a_table_of_keys_is_the_keys_of_each_use():
    """Also of another batch size, of sites that the pass before did not use, and replayed after later passes."""
    layers = keys("a", "b", "c", "d")
    mpu.dropout_state.set(0, 0)
    direct = {
        (first, batch): masks_of(keys("a", "b", "c"), first, batch)
        for first, batch in ((40, 3), (50, 1))
    }
    mpu.dropout_state.set(3, 7)
    layers["d"](torch.ones(2, 3))
    masks_of(layers, 1, 2)
    for (first, batch), expected in direct.items():
        assert all(
            torch.equal(a, b) for a, b in zip(masks_of(layers, first, batch), expected, strict=True)
        )
        mpu.dropout_state.set(3, first)
        key = mpu.dropout_state.capture()
        for _ in range(2):
            mpu.dropout_state.set(3, 99)
            layers["d"](torch.ones(1, 2))
        with mpu.dropout_state.replay(key):
            again = [layers[name](torch.ones(batch, 5, 7)) != 0 for name in ("c", "a")]
        assert torch.equal(again[0], expected[3])
        assert torch.equal(again[1], expected[0])
        masks_of(layers, 1, 2)


def test_keys_cost_a_site_no_operators_after_the_first_pass():
    """Twenty sites more cost twenty dropouts more."""
    counts, x = [], torch.ones(4, 3)
    for sites in (2, 22):
        layers = keys(*(f"site{i}" for i in range(sites)))
        for first in (0, 8):
            mpu.dropout_state.set(5, first)
            with Counted() as counted:
                for layer in layers.values():
                    layer(x)
        counts.append(counted.computed)
    assert counts[1] - counts[0] == 20


def test_misuse_is_an_error():
    with pytest.raises(
        ValueError, match=r"dropout probability 1\.0 must be at least 0 and below 1"
    ):
        mpu.Dropout(1.0)
    with pytest.raises(RuntimeError, match=r"call assign_dropout_sites\(model\) once"):
        mpu.Dropout(0.1)(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"call dropout_state\.set\(seed, first_sample\) before"):
        dropout.DropoutState().visit(0, 1, torch.device("cpu"))


def test_scaled_masked_softmax():
    """Against fp64; rows that may attend to nothing give zeros and zero gradients."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 6, generator=generator).requires_grad_()
    mask = torch.rand(2, 1, 5, 6, generator=generator) < 0.5
    mask[0, 0, 2] = False
    exact = scores.detach().double().requires_grad_()
    expected = (exact * 0.3).masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0)
    actual = mpu.scaled_masked_softmax(scores, mask, scale=0.3)
    grad = torch.randn(2, 3, 5, 6, generator=generator)
    actual.backward(grad)
    # nan_to_num has no gradient at NaN, but softmax would pass NaN on: compare the other rows.
    [expected_grad] = torch.autograd.grad(expected, exact, grad.double())
    expected_grad = expected_grad.masked_fill(~mask.any(-1, keepdim=True), 0)
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(scores.grad.double(), expected_grad, rtol=1e-5, atol=1e-7)
    assert mpu.scaled_masked_softmax(scores.bfloat16(), None).dtype == torch.bfloat16
    poisoned = scores.detach().clone()
    poisoned[0, 0, 0, 0] = float("nan")
    assert mpu.scaled_masked_softmax(poisoned)[0, 0, 0].isnan().all()
