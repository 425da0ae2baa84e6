"""Qwen2: biases of queries, keys and values; tied; windows in the upper layers, or where the file says."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
CASES = {
    "Qwen2ForCausalLM": Case(SIZES),
    "Qwen2ForCausalLM, eight query and two key-value heads": Case(
        {**SIZES, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2},
        sizes=(1, 3, 4, 6),
    ),
    "Qwen2ForCausalLM, windows in the upper layers, tied": Case(
        {
            **SIZES,
            **WINDOWS,
            "num_key_value_heads": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        }
    ),
    "Qwen2ForCausalLM, windows where the file says": Case(
        {**SIZES, **WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "Qwen2Model": Case(SIZES),
    "Qwen2ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Qwen2ForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "Qwen2ForQuestionAnswering": Case(SIZES, padding=("right", "")),
}
