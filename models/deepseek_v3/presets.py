"""Lists the released sizes of DeepSeek-V3 and Moonlight under Hugging Face's names, and a size for a
first run.

The sizes are those of config.json in deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1 and
moonshotai/Moonlight-16B-A3B.
"""

from __future__ import annotations

from functools import partial

from .config import DeepseekV3Config

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_deepseek = partial(DeepseekV3Config, max_position_embeddings=163840, rope_parameters=_YARN)

PRESETS: dict[str, DeepseekV3Config] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "deepseek_v3-quickstart": DeepseekV3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_nextn_predict_layers=0,
    ),
    "deepseek-v3": _deepseek(),
    "deepseek-r1": _deepseek(),
    "moonlight-16b-a3b": DeepseekV3Config(
        vocab_size=163840,
        hidden_size=2048,
        intermediate_size=11264,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 50000.0},
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        q_lora_rank=None,
        num_nextn_predict_layers=0,
        bos_token_id=163584,
        eos_token_id=163585,
    ),
}
