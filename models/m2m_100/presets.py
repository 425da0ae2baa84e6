"""Lists the released sizes of M2M100 and NLLB under Hugging Face's names, without layer drop."""

from __future__ import annotations

from functools import partial
from typing import Any

from .config import M2M100Config

_m2m = partial(M2M100Config, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
_nllb = partial(_m2m, vocab_size=256206)


def _deep(feed_forward: int) -> dict[str, Any]:
    """Returns the sizes of 24 layers."""
    return {
        "encoder_layers": 24,
        "encoder_ffn_dim": feed_forward,
        "decoder_layers": 24,
        "decoder_ffn_dim": feed_forward,
    }


PRESETS: dict[str, M2M100Config] = {
    "m2m100_418m": _m2m(),
    "m2m100_1.2b": _m2m(**_deep(8192)),
    "nllb-200-distilled-600m": _nllb(),
    "nllb-200-distilled-1.3b": _nllb(**_deep(8192)),
    "nllb-200-1.3b": _nllb(**_deep(8192)),
    "nllb-200-3.3b": _nllb(
        **_deep(8192), d_model=2048, encoder_attention_heads=16, decoder_attention_heads=16
    ),
}
