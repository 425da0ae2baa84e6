"""Lists the released sizes of Mixtral under Hugging Face's names, and a size for a first run."""

from __future__ import annotations

from .config import MixtralConfig

PRESETS: dict[str, MixtralConfig] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "mixtral-quickstart": MixtralConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_local_experts=8,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
    "mixtral-8x7b-v0.1": MixtralConfig(
        max_position_embeddings=32768, rope_parameters={"rope_theta": 1e6}
    ),
    "mixtral-8x22b-v0.1": MixtralConfig(
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        max_position_embeddings=65536,
        rope_parameters={"rope_theta": 1e6},
    ),
}
