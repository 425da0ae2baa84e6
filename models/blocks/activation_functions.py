"""The activation functions by the names that transformers gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import relu

gelu_tanh = partial(F.gelu, approximate="tanh")


def clipped_gelu(x: Tensor) -> Tensor:
    """Computes GELU clipped to [-10, 10] (arXiv:2004.09602)."""
    return torch.clip(F.gelu(x), -10, 10)


def quick_gelu(x: Tensor) -> Tensor:
    """Computes x · sigmoid(1.702 x), an approximation of GELU (arXiv:1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """Computes relu(x)² (arXiv:2109.08668)."""
    return torch.square(relu(x))


def laplace(x: Tensor) -> Tensor:
    """Computes the distribution function of a normal distribution, with the mean and the deviation
    that approximate the squared ReLU (arXiv:2209.10655).
    """
    mean = 0.707107
    deviation = 0.282095
    return 0.5 * (1.0 + torch.erf((x - mean).div(deviation * math.sqrt(2.0))))


def sqrt_softplus(x: Tensor) -> Tensor:
    """Computes √softplus(x)."""
    return F.softplus(x).sqrt()


def identity(x: Tensor) -> Tensor:
    return x


# The names are transformers'. Those of one function with other roundings are one function here:
# "gelu_python" is the exact GELU, and "gelu_new", "gelu_fast", "gelu_accurate" and the names with
# "tanh" are its tanh approximation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_10": clipped_gelu,
    "gelu_accurate": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_python": F.gelu,
    "gelu_python_tanh": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "hardswish": F.hardswish,
    "laplace": laplace,
    "leaky_relu": F.leaky_relu,
    "linear": identity,
    "mish": F.mish,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": squared_relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": sqrt_softplus,
    "swish": F.silu,
    "tanh": torch.tanh,
}
# These names of transformers are modules with weights, which no file of a family here has.
WITH_WEIGHTS = ("prelu", "xielu")


def find_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation with this name in transformers.

    Raises ValueError for an unknown name, and for one of an activation with weights.
    """
    if name in WITH_WEIGHTS:
        raise ValueError(
            f"activation {name!r} has weights of its own, which are not supported; "
            f"use one of {', '.join(ACTIVATIONS)}"
        )
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
