"""gpt-oss: sinks, alternating windows, experts with biases in stacked files; numbers that no rank divides."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 13, "head_dim": 6,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "num_local_experts": 5,
    "num_experts_per_tok": 2, "sliding_window": 5, **TOKENS,
}  # fmt: skip
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
# transformers 5.17 and 5.18 compute with a `swiglu_limit` of 7, whatever the configuration says.
LIMIT_SINCE = "5.19"
CASES = {
    "GptOssForCausalLM": Case({**SIZES, **BALANCED, "rope_parameters": YARN, "attention_dropout": 0.2}),
    "GptOssForCausalLM, windows in the last layers, clamped, tied, no biases": Case(
        {**SIZES, **BALANCED, "num_hidden_layers": 3, "swiglu_limit": 0.02, "attention_bias": False,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": True},
        since=LIMIT_SINCE,
    ),
    "GptOssModel": Case({**SIZES, "num_local_experts": 9, "num_experts_per_tok": 3}),
    "GptOssForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "GptOssForTokenClassification": Case({**SIZES, "num_labels": 5}),
}  # fmt: skip
