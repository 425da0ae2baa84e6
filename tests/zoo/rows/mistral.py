"""Mistral: windows shorter than the sequences, and none."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35, "head_dim": 6,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "sliding_window": 5, **TOKENS,
}  # fmt: skip
CASES = {
    "MistralForCausalLM": Case(SIZES),
    "MistralForCausalLM, no window, tied": Case(
        {**SIZES, "num_key_value_heads": 6, "sliding_window": None, "tie_word_embeddings": True}
    ),
    "MistralModel": Case(SIZES),
    "MistralForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "MistralForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "MistralForQuestionAnswering": Case({**SIZES, "sliding_window": 8}, padding=("right", "")),
}
