"""The activation functions against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2CLS, ACT2FN

from shardzoo.models.blocks.activation_functions import ACTIVATIONS, WITH_WEIGHTS, find_activation


def test_every_name_of_transformers_is_known():
    assert set(ACT2CLS) == {*ACTIVATIONS, *WITH_WEIGHTS}
    with_parameters = {name for name in set(ACT2CLS) - {"xielu"} if list(ACT2FN[name].parameters())}
    assert with_parameters == {"prelu"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_are_those_of_transformers(name):
    x = torch.cat([torch.randn(400) * 3, torch.tensor([-30.0, -6, -0.0, 0, 3, 6, 10, 30])])
    ours = x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    values = find_activation(name)(ours)
    expected = ACT2FN[name](theirs)
    weights = torch.randn(x.shape)
    (values * weights).sum().backward()
    (expected * weights).sum().backward()
    # The tanh approximation is one function here, which transformers computes in several ways.
    torch.testing.assert_close(values, expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_an_activation_with_weights_is_refused(name):
    with pytest.raises(ValueError, match="has weights of its own"):
        find_activation(name)
