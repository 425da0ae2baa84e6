"""Lists the released sizes of Granite 3 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import GraniteConfig

_granite3 = partial(
    GraniteConfig,
    vocab_size=49155,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 10000.0},
    tie_word_embeddings=True,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)

PRESETS: dict[str, GraniteConfig] = {
    "granite-3.0-2b-base": _granite3(
        hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0
    ),
    "granite-3.0-8b-base": _granite3(
        hidden_size=4096,
        intermediate_size=12800,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
    ),
}
