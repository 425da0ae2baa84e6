"""Lists the released sizes of Qwen2 and Qwen2.5 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import Qwen2Config

_qwen2 = partial(
    Qwen2Config,
    max_position_embeddings=131072,
    rope_parameters={"rope_theta": 1e6},
    bos_token_id=151643,
    eos_token_id=151643,
)
_small = partial(_qwen2, tie_word_embeddings=True, num_key_value_heads=2)
_wide = partial(_qwen2, vocab_size=152064)
_SHARED = {
    "0.5b": partial(_small, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5b": partial(_small, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
    "7b": partial(
        _wide, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "72b": partial(
        _wide, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, rms_norm_eps=1e-5,
    ),
}  # fmt: skip
_5120 = partial(
    _wide, hidden_size=5120, num_attention_heads=40, num_key_value_heads=8, rms_norm_eps=1e-5
)

PRESETS: dict[str, Qwen2Config] = {
    **{f"qwen2-{size}": make() for size, make in _SHARED.items()},
    **{f"qwen2.5-{size}": make() for size, make in _SHARED.items() if size != "0.5b"},
    "qwen2.5-0.5b": _SHARED["0.5b"](max_position_embeddings=32768),
    "qwen2.5-3b": _small(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        max_position_embeddings=32768,
    ),
    "qwen2.5-14b": _5120(intermediate_size=13824, num_hidden_layers=48),
    "qwen2.5-32b": _5120(intermediate_size=27648, num_hidden_layers=64),
}
