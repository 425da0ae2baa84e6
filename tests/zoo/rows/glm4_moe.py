"""GLM-4.5: corrected scores, groups of experts, a shared expert; half of each head rotates; norms and biases."""

from corrected_scores import correct_scores
from matrix import Case

SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "moe_intermediate_size": 13,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "Glm4MoeForCausalLM": Case(
        {**SIZES, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7}, mend=correct_scores
    ),
    "Glm4MoeForCausalLM, groups, two shared, not normalized, tied": Case(
        {**SIZES, "n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
         "norm_topk_prob": False, "tie_word_embeddings": True, "num_hidden_layers": 3, "first_k_dense_replace": 2},
        mend=correct_scores,
    ),
    "Glm4MoeModel": Case({**SIZES, "first_k_dense_replace": 0}, mend=correct_scores),
}  # fmt: skip
