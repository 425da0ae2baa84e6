"""Describes the blocks of gpt-oss for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations
from ..mixtral.memory import activations as mixture_activations
from .config import GptOssConfig


def activations(config: GptOssConfig) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass."""
    found = mixture_activations(config)
    [stack] = found.stacks
    block = replace(
        stack.block, sinks=True, normalized=False, chosen_first=True, expert_biases=True
    )
    return replace(found, stacks=(replace(stack, block=block),))
