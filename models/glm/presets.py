"""Lists every released size of the original GLM under its name on the hub, and a small model for
two CPU cores.

The authors padded the vocabularies to a multiple of 128: 30592 for BERT's word pieces, 50304 for
the byte-level BPE of GPT-2 and RoBERTa, 50048 for the Chinese SentencePiece model.
"""

from __future__ import annotations

from .config import GLMConfig

_BASE = GLMConfig(num_layers=12, hidden_size=768, num_attention_heads=12)
_LARGE = GLMConfig()
_LARGE_CHINESE = GLMConfig(vocab_size=50048, max_sequence_length=1024)
_10B = GLMConfig(
    vocab_size=50304, num_layers=48, hidden_size=4096, num_attention_heads=64, max_sequence_length=1024
)  # fmt: skip

PRESETS: dict[str, GLMConfig] = {
    "glm-base": _BASE,
    "glm-large": _LARGE,
    "glm-doc": _LARGE,
    "glm-410m": GLMConfig(num_layers=30),
    "glm-515m": GLMConfig(num_layers=30, hidden_size=1152, num_attention_heads=18),
    "glm-roberta-large": GLMConfig(vocab_size=50304),
    "glm-large-chinese": _LARGE_CHINESE,
    "glm-2b": _10B.with_changes(num_layers=36, hidden_size=2048, num_attention_heads=32),
    "glm-10b": _10B,
    "glm-10b-chinese": _10B.with_changes(vocab_size=50048),
    "glm-quickstart": GLMConfig(
        vocab_size=1152,
        num_layers=2,
        hidden_size=160,
        num_attention_heads=4,
        max_sequence_length=256,
        embedding_dropout_prob=0.0,  # the text is read about once, so the model cannot learn it by heart
        attention_dropout_prob=0.0,
        output_dropout_prob=0.0,
    ),
}
