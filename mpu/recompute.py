"""Activation recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .dropout import dropout_state


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, keeping only its inputs and computing it again in backward.

    The dropout masks of the first run are replayed exactly; so is torch's own random state. Around a whole block it
    is full recomputation, around the attention core alone selective recomputation (arXiv:2205.05198, section 5).
    """
    key = dropout_state.capture()
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), dropout_state.replay(key)), **kwargs
    )
