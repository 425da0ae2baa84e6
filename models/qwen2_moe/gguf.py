"""Tells how GGUF files spell Qwen2-MoE."""

from __future__ import annotations

from ..llama.gguf import EXPERTS, gguf
from ..qwen3_moe.gguf import QWEN_KEYS

# llama.cpp never divides the weights of a token's experts by their sum.
GGUF = gguf(
    "qwen2moe",
    "Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    keys={**QWEN_KEYS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    block={
        **EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    single_rows=("blk.ffn_gate_inp_shexp",),
    constants={"norm_topk_prob": False},
)
