"""Lists the released UMT5 sizes under Hugging Face's names, and a model that two CPU cores train in
minutes.
"""

from __future__ import annotations

from functools import partial

from .config import UMT5Config

_published = partial(UMT5Config, vocab_size=256384, tie_word_embeddings=False)

PRESETS: dict[str, UMT5Config] = {
    "umt5-small": _published(),
    "umt5-base": _published(d_model=768, d_ff=2048, num_layers=12, num_heads=12),
    "umt5-xl": _published(d_model=2048, d_ff=5120, num_layers=24, num_heads=32),
    "umt5-xxl": _published(d_model=4096, d_ff=10240, num_layers=24, num_heads=64),
    # Its head is tied, because transformers 5 computes no other UMT5 as published.
    "umt5-quickstart": UMT5Config(
        vocab_size=1100, d_model=128, d_kv=32, d_ff=384, num_layers=2, num_heads=4, dropout_rate=0.0
    ),
}
