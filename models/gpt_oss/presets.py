"""Lists the released sizes of gpt-oss under Hugging Face's names, and a size for a first run."""

from __future__ import annotations

from functools import partial

from .config import GptOssConfig

_gpt_oss = partial(GptOssConfig, pad_token_id=199999, eos_token_id=200002, router_aux_loss_coef=0.9)

PRESETS: dict[str, GptOssConfig] = {
    # About as many active parameters as llama-quickstart, and as quick to train.
    "gpt-oss-quickstart": GptOssConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0},
        sliding_window=64,
        num_local_experts=8,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
    "gpt-oss-20b": _gpt_oss(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": _gpt_oss(),
}
