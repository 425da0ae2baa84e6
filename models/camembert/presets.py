"""Lists the released CamemBERT sizes under Hugging Face's names."""

from __future__ import annotations

from .config import CamembertConfig

_BASE = CamembertConfig(
    vocab_size=32005,
    max_position_embeddings=514,
    type_vocab_size=1,
    layer_norm_eps=1e-5,
    bos_token_id=5,
    eos_token_id=6,
)

PRESETS: dict[str, CamembertConfig] = {
    "camembert-base": _BASE,
    "camembert-large": _BASE.with_changes(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
