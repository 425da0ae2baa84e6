"""Lists the released sizes of GLM-4.5 under Hugging Face's names, and a size for a first run.

The sizes are those of config.json in zai-org/GLM-4.5-Air, zai-org/GLM-4.5 and zai-org/GLM-4.6.
"""

from __future__ import annotations

from functools import partial

from .config import Glm4MoeConfig

_glm = partial(
    Glm4MoeConfig,
    head_dim=128,
    attention_bias=True,
    rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5},
    pad_token_id=151329,
    eos_token_id=[151329, 151336, 151338],
)
_glm_large = partial(
    _glm,
    hidden_size=5120,
    intermediate_size=12288,
    num_hidden_layers=92,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    use_qk_norm=True,
)

PRESETS: dict[str, Glm4MoeConfig] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "glm4_moe-quickstart": Glm4MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_nextn_predict_layers=0,
        use_qk_norm=True,
    ),
    "glm-4.5-air": _glm(),
    "glm-4.5": _glm_large(),
    "glm-4.6": _glm_large(max_position_embeddings=202752),
}
