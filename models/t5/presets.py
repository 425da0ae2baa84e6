"""Lists the released T5 sizes under Hugging Face's names, and a small model that two CPU cores train in minutes."""

from __future__ import annotations

from functools import partial

from .config import T5Config

_v1_1 = partial(T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False)

PRESETS: dict[str, T5Config] = {
    "t5-small": T5Config(),
    "t5-base": T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "t5-large": T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "t5-3b": T5Config(d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32),
    "t5-11b": T5Config(d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128),
    "t5-v1_1-small": _v1_1(d_model=512, d_ff=1024, num_layers=8, num_heads=6),
    "t5-v1_1-base": _v1_1(d_model=768, d_ff=2048, num_layers=12, num_heads=12),
    "t5-v1_1-large": _v1_1(d_model=1024, d_ff=2816, num_layers=24, num_heads=16),
    "t5-v1_1-xl": _v1_1(d_model=2048, d_ff=5120, num_layers=24, num_heads=32),
    "t5-v1_1-xxl": _v1_1(d_model=4096, d_ff=10240, num_layers=24, num_heads=64),
    "t5-quickstart": _v1_1(
        vocab_size=1100,
        d_model=128,
        d_kv=32,
        d_ff=384,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,  # the text is read about once, so the model cannot learn it by heart
    ),
}
