"""M2M100: sinusoidal positions that skip padding, pre-LayerNorm, ReLU."""

from matrix import Case

SIZES = {
    "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 30, "decoder_layers": 2,
    "decoder_attention_heads": 6, "decoder_ffn_dim": 36, "vocab_size": 97, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
CASES = {
    "M2M100ForConditionalGeneration": Case(SIZES, sizes=(1, 2, 3, 6)),
    "M2M100Model": Case(SIZES),
    "M2M100Encoder": Case(SIZES),
    "M2M100ForConditionalGeneration, own embeddings": Case({**SIZES, "tie_word_embeddings": False}),
}
