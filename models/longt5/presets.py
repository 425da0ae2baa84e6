"""Lists the released sizes of LongT5 under Hugging Face's names.

The sizes with transient-global attention are those of the `config.json` of google/long-t5-tglobal-base,
and of published models that were made from google/long-t5-tglobal-large and -xl and keep their
configuration. Those with local attention are the same.
"""

from __future__ import annotations

from functools import partial

from .config import LongT5Config

_longt5 = partial(LongT5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
_base = partial(_longt5, d_model=768, d_ff=2048, num_layers=12, num_heads=12)
_large = partial(_longt5, d_model=1024, d_ff=2816, num_layers=24, num_heads=16)
_xl = partial(_longt5, d_model=2048, d_ff=5120, num_layers=24, num_heads=32)

PRESETS: dict[str, LongT5Config] = {
    "long-t5-local-base": _base(),
    "long-t5-local-large": _large(),
    "long-t5-tglobal-base": _base(encoder_attention_type="transient-global"),
    "long-t5-tglobal-large": _large(encoder_attention_type="transient-global"),
    "long-t5-tglobal-xl": _xl(encoder_attention_type="transient-global"),
}
