"""Recomputation gives the gradients of keeping everything, with the same dropout masks."""

from __future__ import annotations

import pytest
import torch
from every_case import by_turns
from small_transformer import build_transformer

from shardzoo import mpu


def gradients(mesh, build, recompute, sequence_parallel, dtype):
    model = build(
        mesh,
        layers=2,
        vocabulary=37,
        hidden=16,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    model.to(dtype)
    ids = torch.arange(24).view(2, 12) % 37
    mpu.dropout_state.set(1, 0)
    first = model(ids, ids)
    # Another micro-batch before the backward of the first, as in a pipeline: the key has moved on by then.
    mpu.dropout_state.set(1, 2)
    second = model(ids, ids)
    first.backward()
    second.backward()
    key = mpu.dropout_state.capture()
    assert key is not None
    assert key.first_sample == 2  # recomputation has put the key back
    return first.detach(), second.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", by_turns([torch.float32, torch.bfloat16], 2))
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_changes_nothing(tp, recompute, sequence_parallel, dtype, run_mesh):
    arguments = (gradients, build_transformer)
    kept = run_mesh(tp, *arguments, "none", sequence_parallel, dtype)
    again = run_mesh(tp, *arguments, recompute, sequence_parallel, dtype)
    for (first, second, grads), (first_again, second_again, grads_again) in zip(
        kept, again, strict=True
    ):
        assert torch.equal(first, first_again)
        assert torch.equal(second, second_again)
        assert not torch.equal(first, second)  # dropout was on, and keyed by sample
        for name, grad in grads.items():
            assert torch.equal(grad, grads_again[name]), name


def test_a_module_used_twice_draws_two_masks_and_replays_both():
    layer = torch.nn.ModuleDict({"drop": mpu.Dropout(0.5)})
    mpu.assign_dropout_sites(layer)
    drop = layer["drop"]

    def twice(x):
        return drop(x).exp() + drop(x).exp()

    results = []
    for function in (twice, lambda x: mpu.checkpoint(twice, x)):
        mpu.dropout_state.set(0, 0)
        x = torch.ones(2, 8, 8, requires_grad=True)
        drop(x.detach())
        output = function(x)
        after = drop(torch.ones(2, 8, 8))
        output.sum().backward()
        results.append((output.detach(), x.grad, after))
    for plain, replayed in zip(*results, strict=True):
        assert torch.equal(plain, replayed)
    mpu.dropout_state.set(0, 0)
    assert not torch.equal(drop(torch.ones(2, 8, 8)), drop(torch.ones(2, 8, 8)))


def test_the_key_comes_back_after_an_error():
    mpu.dropout_state.set(7, 3)
    key = mpu.dropout_state.capture()
    mpu.dropout_state.set(8, 4)
    with pytest.raises(KeyError), mpu.dropout_state.replay(key):
        raise KeyError
    current = mpu.dropout_state.capture()
    assert current is not None
    assert (current.seed, current.first_sample) == (8, 4)


def test_keyword_arguments_and_several_results():
    x = torch.ones(3, requires_grad=True)
    double, triple = mpu.checkpoint(lambda x, factor: (x * 2, x * factor), x, factor=3)
    (double + triple).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))
