"""Tells how GGUF files spell Qwen3-MoE."""

from __future__ import annotations

from ..llama.gguf import EXPERTS, HEAD_SIZE, gguf

QWEN_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

# llama.cpp always divides the weights of a token's experts by their sum.
GGUF = gguf(
    "qwen3moe",
    "Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys={**HEAD_SIZE, **QWEN_KEYS},
    block=EXPERTS,
    constants={"norm_topk_prob": True},
)
