"""T5 and mT5 at 2,048 to 8,192 positions: the numbers of transformers, the same in every layout."""

from __future__ import annotations

import pytest
import torch
from every_case import by_turns, every_day
from parity import assert_same, oracle, randomize, run_modes, whole
from tiny_models import hf_model, tiny

from shardzoo import mpu
from shardzoo.models import ParallelConfig, config_from_dict, from_config

# Not ReLU: of so many activations one lies within rounding of its kink, where the gradient jumps.
SIZES = {"layers": 1, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
ARCHITECTURES = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}


def batch_of(length, samples):
    """All samples but the first are shorter, which the lengths of their labels follow."""
    generator = torch.Generator().manual_seed(length)
    ids, labels = (
        torch.randint(3, 97, (samples, n), generator=generator) for n in (length, length // 4 + 4)
    )
    mask = torch.ones_like(ids)
    mask[1:, -length // 3 :] = 0
    labels[1:, -length // 5 :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("length", every_day([2048], more=[4096, 8192]))
@pytest.mark.parametrize("family", every_day(["mt5"], more=["t5"]))
def test_long_samples_have_the_numbers_of_transformers(family, length, run_mesh):
    """Logits as near to those of fp64 as transformers' own of fp32, whose error grows with the length as ours does.

    At 8,192 positions theirs is 1.1e-5 of the scale at most, ours 1.5e-5; their root mean squares are within 6 %.
    """
    model = hf_model(ARCHITECTURES[family], 0.0, **SIZES)
    if family == "mt5":  # transformers 5 ties the head of a new model, which no published mT5 does
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomize(model, 1)
    inputs = batch_of(length, min(2, 8192 // length))
    stored = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        theirs = model.eval()(**inputs).logits
    expected = oracle(
        model.double(), inputs
    )  # in fp32 it adds up millions of scores' gradients one after the other
    config = tiny(family, 0.0, **SIZES)
    ranks = run_mesh(2, run_modes, config, stored, inputs, [(False, "none")], 5)
    ours, theirs = whole(config, ranks, 0), theirs - expected.logits
    assert_same(ours, expected, logits=2 * float(theirs.abs().max() / expected.logits.abs().max()))
    assert (ours.logits - expected.logits).norm() < 1.25 * theirs.norm()


def step(mesh, family, sequence_parallel, recompute):
    parallel_config = ParallelConfig(sequence_parallel=sequence_parallel, recompute=recompute)
    model = from_config(
        config_from_dict(tiny(family, 0.1, **SIZES)), mesh, parallel_config=parallel_config
    ).train()
    mpu.dropout_state.set(3, 8)
    loss = model(**batch_of(8192, 2)).loss
    loss.backward()
    return loss.detach(), model.word_embeddings.weight.grad.norm()


@pytest.mark.before_release
@pytest.mark.parametrize("family", by_turns(ARCHITECTURES, 2))
def test_a_step_with_8192_positions_is_the_same_in_every_layout(family, run_mesh):
    loss, norm = step(None, family, False, "none")
    assert norm.isfinite()
    for other, _ in run_mesh(2, step, family, True, "full" if family == "t5" else "selective"):
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
