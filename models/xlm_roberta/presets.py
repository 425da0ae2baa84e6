"""Lists the released XLM-RoBERTa sizes under Hugging Face's names."""

from __future__ import annotations

from .config import XLMRobertaConfig

_BASE = XLMRobertaConfig(
    vocab_size=250002, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
)

PRESETS: dict[str, XLMRobertaConfig] = {
    "xlm-roberta-base": _BASE,
    "xlm-roberta-large": _BASE.with_changes(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
