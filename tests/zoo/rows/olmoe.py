"""OLMoE: norms over the queries, and the keys, of all heads; clipped projections; grouped queries."""

from matrix import Case

SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 13,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "num_experts": 5,
    "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "OlmoeForCausalLM": Case({**SIZES, "output_router_logits": True, "router_aux_loss_coef": 0.3}),
    "OlmoeForCausalLM, clipped, grouped queries, normalized": Case(
        {**SIZES, "clip_qkv": 1.3, "num_key_value_heads": 3, "norm_topk_prob": True, "attention_bias": True},
        sizes=(1, 3),
    ),
    "OlmoeModel": Case({**SIZES, "num_experts": 9, "num_experts_per_tok": 3}),
}  # fmt: skip
