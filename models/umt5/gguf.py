"""Tells how GGUF files spell UMT5, which have T5's name and a table of positions in each layer."""

from __future__ import annotations

from ..t5.gguf import gguf, has_a_table_per_layer

GGUF = [
    gguf("t5", "umt5", "UMT5ForConditionalGeneration", has_a_table_per_layer, gated=True),
    gguf("t5encoder", "umt5", "UMT5EncoderModel", has_a_table_per_layer, gated=True),
]
