"""Lists the released BERT sizes under Hugging Face's names, and a small model that two CPU cores
train in minutes.

The cased vocabularies are smaller.
"""

from __future__ import annotations

from .config import BertConfig

_BASE = BertConfig()
_LARGE = BertConfig(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)
_CASED = 28996

PRESETS: dict[str, BertConfig] = {
    "bert-base-uncased": _BASE,
    "bert-base-cased": _BASE.with_changes(vocab_size=_CASED),
    "bert-large-uncased": _LARGE,
    "bert-large-cased": _LARGE.with_changes(vocab_size=_CASED),
    "bert-large-uncased-whole-word-masking": _LARGE,
    "bert-large-cased-whole-word-masking": _LARGE.with_changes(vocab_size=_CASED),
    "bert-base-chinese": _BASE.with_changes(vocab_size=21128),
    "bert-base-multilingual-uncased": _BASE.with_changes(vocab_size=105879),
    "bert-base-multilingual-cased": _BASE.with_changes(vocab_size=119547),
    "bert-quickstart": BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,  # the text is read about once, so the model cannot learn it by heart
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,  # 0.02 is for larger models; here attention would find the positions later
    ),
}
