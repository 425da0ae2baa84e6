"""Lists the usual size of OPUS-MT's models under the names of two of them."""

from __future__ import annotations

from functools import partial

from .config import MarianConfig

_base = partial(
    MarianConfig,
    max_position_embeddings=512,
    encoder_layers=6,
    encoder_ffn_dim=2048,
    encoder_attention_heads=8,
    decoder_layers=6,
    decoder_ffn_dim=2048,
    decoder_attention_heads=8,
    activation_function="swish",
    d_model=512,
    scale_embedding=True,
)

PRESETS: dict[str, MarianConfig] = {
    "opus-mt-en-de": _base(),
    "opus-mt-en-fr": _base(vocab_size=59514, pad_token_id=59513, decoder_start_token_id=59513),
}
