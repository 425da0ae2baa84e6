"""Lists the released sizes of Pegasus under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import PegasusConfig

_large = partial(
    PegasusConfig,
    vocab_size=96103,
    encoder_layers=16,
    decoder_layers=16,
    activation_function="relu",
    attention_dropout=0.1,
    activation_dropout=0.1,
    scale_embedding=True,
)

PRESETS: dict[str, PegasusConfig] = {
    "pegasus-large": _large(),
    "pegasus-xsum": _large(max_position_embeddings=512),
}
