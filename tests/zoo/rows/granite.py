"""Granite: scaled embeddings, residuals, scores and logits."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21,
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.22,
    "logits_scaling": 0.5, **TOKENS,
}  # fmt: skip
CASES = {
    "GraniteForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "GraniteForCausalLM, tied, biases": Case(
        {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "GraniteModel": Case(SIZES),
}
