"""Lists the released sizes of Qwen2-MoE under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import Qwen2MoeConfig

_qwen = partial(
    Qwen2MoeConfig, rope_parameters={"rope_theta": 1e6}, bos_token_id=151643, eos_token_id=151643
)

PRESETS: dict[str, Qwen2MoeConfig] = {
    "qwen1.5-moe-a2.7b": _qwen(max_position_embeddings=8192),
    "qwen2-57b-a14b": _qwen(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        max_position_embeddings=131072,
    ),
}
