"""Makes the configuration of a mixture from that of a dense model with the same attention."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig


def describe_mixture(dense: ModelConfig, experts: int, top_k: int) -> dict[str, Any]:
    """Returns the keys of the configuration in which each expert is as wide as the dense MLP, but for
    the family's own names.
    """
    values: dict[str, Any] = dense.to_dict()
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ValueError(f"{name}=true is not supported in a mixture; upcycle a model without")
    return {
        **values,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
    }


def describe_mixtral(dense: ModelConfig, experts: int, top_k: int) -> dict[str, Any]:
    """Returns the keys of a Mixtral's configuration."""
    values = describe_mixture(dense, experts, top_k)
    # Without the key, Mixtral's window would be its default.
    values.setdefault("sliding_window", None)
    return values
