"""Describes the blocks of DeepSeek-V3 for the memory estimate."""

from __future__ import annotations

from dataclasses import replace

from ..activations import Activations, LatentSizes
from ..glm4_moe.memory import activations as mixture_activations
from .config import DeepseekV3Config


def activations(config: DeepseekV3Config) -> Activations:
    """Returns what a model of this configuration keeps for its backward pass.

    The few layers with a single MLP count as mixtures.
    """
    mixture = mixture_activations(config)
    [stack] = mixture.stacks
    sizes = LatentSizes(
        query_rank=config.q_lora_rank or 0,
        rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
    )
    block = replace(stack.block, head_size=sizes.head_size, latent=sizes)
    return replace(mixture, stacks=(replace(stack, block=block),))
