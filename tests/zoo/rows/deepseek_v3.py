"""DeepSeek-V3: latent attention with and without latent queries; YaRN; groups; unequal sizes of heads."""

from corrected_scores import correct_scores
from matrix import Case

SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "moe_intermediate_size": 13,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7,
    "mscale_all_dim": 1.3,
}  # fmt: skip
CASES = {
    "DeepseekV3ForCausalLM": Case({**SIZES, "rope_parameters": YARN, "attention_bias": True}, mend=correct_scores),
    "DeepseekV3ForCausalLM, no latent queries, halves rotate, biases, tied": Case(
        {**SIZES, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "tie_word_embeddings": True,
         "v_head_dim": 11, "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
         "norm_topk_prob": False},
        mend=correct_scores,
    ),
    "DeepseekV3Model": Case({**SIZES, "first_k_dense_replace": 0}, mend=correct_scores),
    "DeepseekV3ForSequenceClassification": Case({**SIZES, "num_labels": 11}, mend=correct_scores),
    "DeepseekV3ForTokenClassification": Case({**SIZES, "num_labels": 5}, mend=correct_scores),
}  # fmt: skip
