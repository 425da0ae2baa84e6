"""Lists the released sizes of Qwen3-MoE under Hugging Face's names, and a size for a first run."""

from __future__ import annotations

from functools import partial

from .config import Qwen3MoeConfig

_qwen3_moe = partial(
    Qwen3MoeConfig,
    head_dim=128,
    max_position_embeddings=40960,
    rope_parameters={"rope_theta": 1e6},
    norm_topk_prob=True,
    bos_token_id=151643,
    eos_token_id=151645,
)

PRESETS: dict[str, Qwen3MoeConfig] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "qwen3_moe-quickstart": Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
    "qwen3-30b-a3b": _qwen3_moe(num_hidden_layers=48),
    "qwen3-235b-a22b": _qwen3_moe(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
    ),
}
