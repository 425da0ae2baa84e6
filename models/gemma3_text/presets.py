"""Lists the released sizes of Gemma 3's language model under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import Gemma3TextConfig

_small = partial(
    Gemma3TextConfig,
    vocab_size=262144,
    num_attention_heads=4,
    num_key_value_heads=1,
    max_position_embeddings=32768,
    sliding_window=512,
)

PRESETS: dict[str, Gemma3TextConfig] = {
    "gemma-3-270m": _small(hidden_size=640, intermediate_size=2048, num_hidden_layers=18),
    "gemma-3-1b-pt": _small(hidden_size=1152, intermediate_size=6912),
}
