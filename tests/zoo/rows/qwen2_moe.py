"""Qwen2-MoE: a shared expert; windows in every second layer; layers without experts; no biases."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "moe_intermediate_size": 13,
    "shared_expert_intermediate_size": 17, "num_experts": 5, "num_experts_per_tok": 2, **TOKENS,
}  # fmt: skip
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
CASES = {
    "Qwen2MoeForCausalLM": Case({**SIZES, **BALANCED}),
    "Qwen2MoeForCausalLM, windows, layers without experts, tied, no biases": Case(
        {**SIZES, **BALANCED, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1],
         "tie_word_embeddings": True, "qkv_bias": False, "norm_topk_prob": True, "use_sliding_window": True,
         "sliding_window": 5, "max_window_layers": 3}
    ),
    "Qwen2MoeModel": Case(SIZES),
    "Qwen2MoeForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Qwen2MoeForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "Qwen2MoeForQuestionAnswering": Case(SIZES, padding=("right", "")),
}  # fmt: skip
