"""Lists the released sizes of Gemma under Hugging Face's names."""

from __future__ import annotations

from .config import GemmaConfig

PRESETS: dict[str, GemmaConfig] = {
    "gemma-2b": GemmaConfig(
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
    ),
    "gemma-7b": GemmaConfig(),
}
