"""Outputs in one process have transformers' shapes."""

from __future__ import annotations

import pickle

import pytest
import torch
from tiny_models import tiny

from shardzoo.models import ParallelConfig, from_config

FAMILIES = ("gpt2", "bert", "roberta", "t5", "glm")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_have_the_vocabulary_without_padding(model_type):
    model = from_config(tiny(model_type, vocab_size=37)).eval()
    ids = torch.arange(10).view(2, 5) + 3
    extra = {"decoder_input_ids": ids} if model_type == "t5" else {}
    logits = model(input_ids=ids, **extra).logits
    assert logits.shape == (2, 5, 37)
    assert torch.equal(model.gather_logits(logits), logits)


def with_labels(model_type):
    torch.manual_seed(0)
    model = from_config(tiny(model_type, vocab_size=37)).eval()
    ids = torch.arange(10).view(2, 5) + 3
    labels = ids.masked_fill(ids % 3 > 0, -100)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model_type == "t5" else {})
    return model, inputs, labels


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_beside_a_loss_are_those_without(model_type):
    model, inputs, labels = with_labels(model_type)
    expected = model(**inputs).logits
    output = model(**inputs, labels=labels)
    assert output.keys()[:2] == ("loss", "logits")
    torch.testing.assert_close(output.logits, expected, rtol=1e-6, atol=1e-6)
    assert output.logits is output.logits is output[1] is output["logits"]
    assert output.logits.requires_grad
    with torch.no_grad():
        output = model(**inputs, labels=labels)
        again = pickle.loads(pickle.dumps(model(**inputs, labels=labels)))
    assert not output.logits.requires_grad
    assert torch.equal(again.logits, output.logits)


def test_logits_of_changed_weights_are_refused():
    model, inputs, labels = with_labels("bert")
    output, read = (model(**inputs, labels=labels) for _ in range(2))
    kept = read.logits.clone()
    read.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(read.logits, kept)
    with pytest.raises(
        RuntimeError, match="logits is computed when it is first read, but the weights have changed"
    ):
        output.logits  # noqa: B018
    with pytest.raises(AttributeError, match="MaskedLMOutput has no attribute 'mems'"):
        output.mems  # noqa: B018


def loss_and_gradients(mesh, model_type, labels, sequence_parallel):
    parallel_config = ParallelConfig(sequence_parallel=sequence_parallel)
    model = from_config(
        tiny(model_type, vocab_size=37), mesh, parallel_config=parallel_config
    ).eval()
    ids = torch.arange(12).view(2, 6) + 3
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward(retain_graph=True)
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, first[name]), name
    norms = {
        name: first[name].norm() for name, p in model.named_parameters() if not hasattr(p, "shard")
    }
    return loss.detach(), norms


def test_a_batch_without_labels_has_no_gradient(run_mesh):
    labels = torch.full((2, 6), -100)
    for sequence_parallel in (False, True):
        for loss, norms in run_mesh(2, loss_and_gradients, "bert", labels, sequence_parallel):
            assert loss.isnan()
            assert all(norm == 0 for norm in norms.values())


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_loss_of_some_positions_on_split_sequences(model_type, run_mesh):
    labels = torch.arange(12).view(2, 6).masked_fill(torch.arange(12).view(2, 6) % 3 > 0, -100)
    whole, norms = loss_and_gradients(None, model_type, labels, False)
    for sequence_parallel in (False, True):
        for loss, own in run_mesh(2, loss_and_gradients, model_type, labels, sequence_parallel):
            torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(own, norms, rtol=1e-4, atol=1e-6)
