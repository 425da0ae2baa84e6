"""Look-ups that share their table's gradient, against `F.embedding` beside a product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardzoo.mpu.embedding import embedding
from shardzoo.ops.embedding import add_embedding_gradient


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradient_is_that_of_separate_uses(tied, padding_idx):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(11, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    first, second = (torch.randint(11, (2, 5), generator=generator) for _ in range(2))
    second[0, :4] = 3

    rows, shared = embedding(first, table, padding_idx)
    more, shared = embedding(second, shared, padding_idx)
    used = shared if tied else table.detach()
    [actual] = torch.autograd.grad(F.linear(rows * more, used).square().sum(), table)

    rows, more = (F.embedding(ids, table, padding_idx) for ids in (first, second))
    used = table if tied else table.detach()
    [expected] = torch.autograd.grad(F.linear(rows * more, used).square().sum(), table)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_16_bit_sums_are_rounded_once():
    table = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, _ = embedding(torch.ones(1000, dtype=torch.long), table)
    rows.sum().backward()
    assert table.grad is not None
    assert table.grad.flatten().tolist() == [
        0,
        1000,
        0,
        0,
    ]  # added one by one in bf16 it would stop at 256


def test_a_gradient_that_belongs_to_others_is_left_alone():
    table = torch.zeros(3, 2, requires_grad=True)
    rows, shared = embedding(torch.tensor([1]), table)
    (rows.sum() + shared.sum()).backward()  # sum's gradient is one number, seen from everywhere
    assert table.grad is not None
    assert torch.equal(table.grad, torch.tensor([[1.0, 1], [2, 2], [1, 1]]))


def test_the_gradient_of_padding_is_left_out_of_the_table_alone():
    rows = torch.full((2, 2), 2.0)
    total = add_embedding_gradient(None, rows, torch.tensor([1, 0]), (3, 2), 0)
    assert total.tolist() == [[0, 0], [2, 2], [0, 0]]
    assert rows.tolist() == [[2, 2], [2, 2]]  # others may hold it


def test_a_16_bit_gradient_is_added_to_that_of_other_uses():
    table = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, shared = embedding(torch.tensor([1, 1, 2]), table)
    (rows.sum() + 3 * shared.sum()).backward()
    assert table.grad is not None
    assert table.grad.flatten().tolist() == [3, 5, 4, 3]
