"""The activation functions by the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ...ops import relu

gelu_tanh = partial(F.gelu, approximate="tanh")

# The names are transformers'. "gelu_new", "gelu_fast" and "gelu_pytorch_tanh" are the tanh
# approximation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "silu": F.silu,
    "swish": F.silu,
}


def find_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation with this name in transformers.

    Raises ValueError for an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
