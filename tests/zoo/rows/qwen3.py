"""Qwen3: norms of queries and keys; tied and untied; biases."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35, "head_dim": 6,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
CASES = {
    "Qwen3ForCausalLM": Case(SIZES),
    "Qwen3ForCausalLM, tied, biases, yarn": Case(
        {**SIZES, "num_key_value_heads": 6, "tie_word_embeddings": True, "attention_bias": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        }}
    ),
    "Qwen3Model": Case(SIZES),
    "Qwen3ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Qwen3ForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "Qwen3ForQuestionAnswering": Case(SIZES, padding=("right", "")),
}  # fmt: skip
