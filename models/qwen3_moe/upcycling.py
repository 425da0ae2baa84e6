"""Makes the configuration of a Qwen3-MoE from that of a Qwen3."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..mixtral.upcycling import describe_mixture


def describe_qwen3_moe(dense: ModelConfig, experts: int, top_k: int) -> dict[str, Any]:
    """Returns the keys of a Qwen3-MoE's configuration."""
    values = describe_mixture(dense, experts, top_k)
    values["norm_topk_prob"] = True
    values["moe_intermediate_size"] = values["intermediate_size"]
    return values
