"""Marian: sinusoidal positions that count padding, post-LayerNorm, SiLU."""

from matrix import Case

SIZES = {
    "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 30, "decoder_layers": 2,
    "decoder_attention_heads": 6, "decoder_ffn_dim": 36, "vocab_size": 97, "scale_embedding": True,
    "max_position_embeddings": 40, "activation_function": "swish",
    "pad_token_id": 96, "decoder_start_token_id": 96,
}  # fmt: skip
CASES = {
    "MarianMTModel": Case(SIZES),
    "MarianModel": Case(SIZES),
    "MarianEncoder": Case(SIZES),
    "MarianForCausalLM": Case(SIZES),
}
