"""Lists the released T5, Flan-T5 and ByT5 sizes under Hugging Face's names, and a model for two CPU
cores.
"""

from __future__ import annotations

from functools import partial

from .config import T5Config

_v1_1 = partial(T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
# ByT5 (Xue et al., 2021, arXiv:2105.13626): tokens are bytes, and the encoder is three times as
# deep as the decoder.
_byt5 = partial(_v1_1, vocab_size=384, tokenizer_class="ByT5Tokenizer")

_V1_1 = {
    "small": _v1_1(d_model=512, d_ff=1024, num_layers=8, num_heads=6),
    "base": _v1_1(d_model=768, d_ff=2048, num_layers=12, num_heads=12),
    "large": _v1_1(d_model=1024, d_ff=2816, num_layers=24, num_heads=16),
    "xl": _v1_1(d_model=2048, d_ff=5120, num_layers=24, num_heads=32),
    "xxl": _v1_1(d_model=4096, d_ff=10240, num_layers=24, num_heads=64),
}

PRESETS: dict[str, T5Config] = {
    "t5-small": T5Config(),
    "t5-base": T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "t5-large": T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "t5-3b": T5Config(d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32),
    "t5-11b": T5Config(d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128),
    **{f"t5-v1_1-{size}": config for size, config in _V1_1.items()},
    **{
        f"flan-t5-{size}": config for size, config in _V1_1.items()
    },  # Chung et al., 2022, arXiv:2210.11416
    "byt5-small": _byt5(d_model=1472, d_ff=3584, num_layers=12, num_decoder_layers=4, num_heads=6),
    "byt5-base": _byt5(d_model=1536, d_ff=3968, num_layers=18, num_decoder_layers=6, num_heads=12),
    "byt5-large": _byt5(
        d_model=1536, d_ff=3840, num_layers=36, num_decoder_layers=12, num_heads=16
    ),
    "byt5-xl": _byt5(d_model=2560, d_ff=6720, num_layers=36, num_decoder_layers=12, num_heads=32),
    "byt5-xxl": _byt5(d_model=4672, d_ff=12352, num_layers=36, num_decoder_layers=12, num_heads=64),
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
