"""Describes Phi-3's blocks for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..llama.memory import activations as llama_activations
from .config import Phi3Config


def activations(config: Phi3Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    (stack,) = llama_activations(config).stacks
    block = replace(stack.block, dropouts=2 if config.resid_pdrop else 0)
    return Activations((replace(stack, block=block),))
