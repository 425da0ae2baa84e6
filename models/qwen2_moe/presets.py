"""Lists the released sizes of Qwen2-MoE under Hugging Face's names, and a size for a first run."""

from __future__ import annotations

from functools import partial

from .config import Qwen2MoeConfig

_qwen = partial(
    Qwen2MoeConfig, rope_parameters={"rope_theta": 1e6}, bos_token_id=151643, eos_token_id=151643
)

PRESETS: dict[str, Qwen2MoeConfig] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "qwen2_moe-quickstart": Qwen2MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=192,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
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
