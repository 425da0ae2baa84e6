"""Whether a call may do what only inference may."""

from __future__ import annotations

import torch


def in_inference_mode() -> bool:
    """Inside `torch.inference_mode()`, eagerly: nothing will ever differentiate, repeat or trace what is calculated.

    Not so under `no_grad`: that pass may be one that is repeated with gradients later, and must round as it does.
    """
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
