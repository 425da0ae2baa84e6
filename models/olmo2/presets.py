"""Lists the released sizes of OLMo 2 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import Olmo2Config

_olmo2 = partial(
    Olmo2Config,
    vocab_size=100352,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_theta": 500000.0},
    pad_token_id=100277,
    eos_token_id=100257,
)

PRESETS: dict[str, Olmo2Config] = {
    "olmo-2-0425-1b": _olmo2(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16
    ),
    "olmo-2-1124-7b": _olmo2(),
    "olmo-2-1124-13b": _olmo2(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
    ),
    "olmo-2-0325-32b": _olmo2(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
}
