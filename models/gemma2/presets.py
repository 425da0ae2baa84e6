"""Lists the released sizes of Gemma 2 under Hugging Face's names."""

from __future__ import annotations

from .config import Gemma2Config

PRESETS: dict[str, Gemma2Config] = {
    "gemma-2-2b": Gemma2Config(),
    "gemma-2-9b": Gemma2Config(
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "gemma-2-27b": Gemma2Config(
        hidden_size=4608,
        intermediate_size=36864,
        num_hidden_layers=46,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        query_pre_attn_scalar=144,
    ),
}
