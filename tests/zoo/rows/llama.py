"""Llama: grouped queries, heads of a width of their own, biases, tied and untied, every scaling of positions."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
THETA = {"rope_theta": 500.0}
CASES = {
    "LlamaForCausalLM": Case(SIZES),
    "LlamaForCausalLM, tied, head size of its own, biases": Case(
        {**SIZES, "head_dim": 6, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "LlamaForCausalLM, llama3": Case(
        {**SIZES, "num_key_value_heads": 6, "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8, **THETA,
        }}
    ),
    "LlamaForCausalLM, dynamic": Case(
        # transformers keeps grown frequencies until a sequence is shorter than this: so that prompts are
        {**SIZES, "max_position_embeddings": 13, "num_key_value_heads": 6, "head_dim": 6, "rope_parameters": {
            "rope_type": "dynamic", "factor": 2.0, **THETA,
        }}
    ),
    "LlamaModel": Case(SIZES),
    "LlamaForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "LlamaForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "LlamaForQuestionAnswering": Case(SIZES, padding=("right", "")),
}  # fmt: skip
