"""Lists the released sizes of Qwen3 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import Qwen3Config

_qwen3 = partial(
    Qwen3Config,
    num_key_value_heads=8,
    max_position_embeddings=40960,
    rope_parameters={"rope_theta": 1e6},
    bos_token_id=151643,
    eos_token_id=151645,
)
_tied = partial(_qwen3, tie_word_embeddings=True)

PRESETS: dict[str, Qwen3Config] = {
    "qwen3-0.6b": _tied(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3-1.7b": _tied(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3-4b": _tied(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
    ),
    "qwen3-8b": _qwen3(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    ),
    "qwen3-14b": _qwen3(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40
    ),
    "qwen3-32b": _qwen3(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64
    ),
}
