"""Lists the released ModernBERT sizes under Hugging Face's names, and a small model for two CPU
cores.
"""

from __future__ import annotations

from .config import ModernBertConfig

_BASE = ModernBertConfig(classifier_pooling="mean")

PRESETS: dict[str, ModernBertConfig] = {
    "modernbert-base": _BASE,
    "modernbert-large": _BASE.with_changes(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624
    ),
    "modernbert-quickstart": _BASE.with_changes(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=512,
        local_attention=16,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        cls_token_id=0,
        sep_token_id=2,
        initializer_range=0.05,  # 0.02 is for larger models; here attention would find the positions later
    ),
}
