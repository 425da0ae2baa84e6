"""Lists the released RoBERTa sizes under Hugging Face's names. 514 positions are enough for 512 tokens."""

from __future__ import annotations

from .config import RobertaConfig

_BASE = RobertaConfig(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)

PRESETS: dict[str, RobertaConfig] = {
    "roberta-base": _BASE,
    "roberta-large": _BASE.with_changes(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
