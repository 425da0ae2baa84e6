"""Tells how GGUF files spell gpt-oss."""

from __future__ import annotations

from ..llama.gguf import HEAD_SIZE, gguf

_MLP = "model.layers.{i}.mlp"

GGUF = gguf(
    "gpt-oss",
    "GptOssForCausalLM",
    model_type="gpt_oss",
    keys={
        **HEAD_SIZE,
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    block={
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    # The features of gate and up alternate.
    alternating={
        f"{_MLP}.experts.gate_up_proj": ("blk.ffn_gate_exps.weight", "blk.ffn_up_exps.weight"),
        f"{_MLP}.experts.gate_up_proj_bias": ("blk.ffn_gate_exps.bias", "blk.ffn_up_exps.bias"),
        f"{_MLP}.experts.down_proj": ("blk.ffn_down_exps.weight",),
        f"{_MLP}.experts.down_proj_bias": ("blk.ffn_down_exps.bias",),
    },
    rope_constants={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
)
