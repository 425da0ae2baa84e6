"""GLM-4: half of each head rotates, neighboring features together; norms on both sides; stacked gate and up."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 36, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
CASES = {
    "Glm4ForCausalLM": Case(SIZES),
    "Glm4ForCausalLM, no biases, three quarters rotate": Case(
        {**SIZES, "num_key_value_heads": 6, "attention_bias": False, "partial_rotary_factor": 0.75}
    ),
    "Glm4ForCausalLM, an odd half of each head": Case(
        {**SIZES, "head_dim": 6, "tie_word_embeddings": True}
    ),
    "Glm4Model": Case(SIZES),
    "Glm4ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Glm4ForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
