"""Tells how GGUF files spell GPT-2."""

from __future__ import annotations

from ...checkpoint.formats.gguf_file import GgufArchitecture

_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

GGUF = GgufArchitecture(
    "gpt2",
    "gpt2",
    "GPT2LMHeadModel",
    names={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        **{f"blk.{stored}": f"transformer.h.{{i}}.{own}" for stored, own in _BLOCK.items()},
    },
    keys={
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    transposed=("blk.attn_qkv", "blk.attn_output", "blk.ffn_up", "blk.ffn_down"),
    is_rotary=False,
    constants={"activation_function": "gelu_new"},
)
