"""Tells how GGUF files spell OLMoE."""

from __future__ import annotations

from ..llama.gguf import EXPERTS, gguf

# llama.cpp never divides the weights of a token's experts by their sum.
GGUF = gguf(
    "olmoe",
    "OlmoeForCausalLM",
    keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    block=EXPERTS,
    constants={"norm_topk_prob": False},
)
