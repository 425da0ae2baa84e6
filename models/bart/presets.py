"""Lists the released sizes of BART under Hugging Face's names, and one for two CPU cores."""

from __future__ import annotations

from .config import BartConfig

PRESETS: dict[str, BartConfig] = {
    "bart-base": BartConfig(
        encoder_layers=6,
        encoder_ffn_dim=3072,
        encoder_attention_heads=12,
        decoder_layers=6,
        decoder_ffn_dim=3072,
        decoder_attention_heads=12,
        d_model=768,
        attention_dropout=0.1,
        activation_dropout=0.1,
        forced_bos_token_id=0,
    ),
    "bart-large": BartConfig(attention_dropout=0.1, activation_dropout=0.1, forced_bos_token_id=0),
    "bart-large-cnn": BartConfig(vocab_size=50264, forced_bos_token_id=0),
    "bart-large-mnli": BartConfig(architecture="BartForSequenceClassification"),
    "bart-quickstart": BartConfig(
        vocab_size=1100,
        max_position_embeddings=128,
        encoder_layers=2,
        encoder_ffn_dim=384,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_ffn_dim=384,
        decoder_attention_heads=4,
        d_model=128,
        dropout=0.0,  # the text is read about once, so the model cannot learn it by heart
    ),
}
