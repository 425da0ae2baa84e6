"""Qwen3-MoE: weights with and without normalization; layers without experts; biases."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35, "head_dim": 6,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "moe_intermediate_size": 13,
    "num_experts": 5, "num_experts_per_tok": 2, **TOKENS,
}  # fmt: skip
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
CASES = {
    "Qwen3MoeForCausalLM": Case({**SIZES, **BALANCED, "norm_topk_prob": True}),
    "Qwen3MoeForCausalLM, layers without experts, tied, biases, yarn": Case(
        {**SIZES, **BALANCED, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1],
         "tie_word_embeddings": True, "attention_bias": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        }}
    ),
    "Qwen3MoeModel": Case({**SIZES, "num_experts": 9, "num_experts_per_tok": 3}),
    "Qwen3MoeForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Qwen3MoeForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "Qwen3MoeForQuestionAnswering": Case(SIZES, padding=("right", "")),
}  # fmt: skip
