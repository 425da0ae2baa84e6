"""Lists the released size of OLMoE under Hugging Face's name, and a size for a first run."""

from __future__ import annotations

from .config import OlmoeConfig

PRESETS: dict[str, OlmoeConfig] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "olmoe-quickstart": OlmoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        num_experts=16,
        num_experts_per_tok=4,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
    "olmoe-1b-7b-0924": OlmoeConfig(intermediate_size=1024),
}
