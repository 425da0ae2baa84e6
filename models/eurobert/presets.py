"""Lists the released sizes of EuroBERT under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import EuroBertConfig

_eurobert = partial(
    EuroBertConfig, rope_parameters={"rope_theta": 250000.0}, tie_word_embeddings=True
)

PRESETS: dict[str, EuroBertConfig] = {
    "eurobert-210m": _eurobert(),
    "eurobert-610m": _eurobert(
        hidden_size=1152,
        intermediate_size=4096,
        num_hidden_layers=26,
        num_attention_heads=18,
        num_key_value_heads=6,
    ),
    "eurobert-2.1b": _eurobert(
        hidden_size=2304,
        intermediate_size=6144,
        num_hidden_layers=32,
        num_attention_heads=18,
        num_key_value_heads=6,
    ),
}
