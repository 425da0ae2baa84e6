"""Lists the released Megatron-BERT sizes under Hugging Face's names, and a small model that two CPU
cores train in minutes.

The vocabularies are BERT's, padded to a multiple of 128 by its trainer.
"""

from __future__ import annotations

from .config import MegatronBertConfig

_CASED = MegatronBertConfig()

PRESETS: dict[str, MegatronBertConfig] = {
    "megatron-bert-uncased-345m": _CASED.with_changes(vocab_size=30592),
    "megatron-bert-cased-345m": _CASED,
    "megatron-bert-quickstart": MegatronBertConfig(
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
