"""Lists the released RoBERTa sizes under Hugging Face's names, and a small model that two CPU cores
train in minutes.

514 positions are enough for 512 tokens.
"""

from __future__ import annotations

from .config import RobertaConfig

_BASE = RobertaConfig(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)

PRESETS: dict[str, RobertaConfig] = {
    "roberta-base": _BASE,
    "roberta-large": _BASE.with_changes(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "distilroberta-base": _BASE.with_changes(num_hidden_layers=6),
    "roberta-quickstart": _BASE.with_changes(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=130,
        hidden_dropout_prob=0.0,  # the text is read about once, so the model cannot learn it by heart
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,  # 0.02 is for larger models; here attention would find the positions later
    ),
}
