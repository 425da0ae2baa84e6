"""Gemma 3's language model: rotations and windows by layer, norms of queries and keys."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# The scores are divided by 10, not by sqrt(6): normalized queries and keys make scores so large that the softmax is
# nearly one key's, and fp32 loses digits of its gradient. Divided by sqrt(2), the gradient of k_proj differs from that
# in fp64 by 1.9e-5 here and by 1.5e-5 in transformers; by sqrt(6), by 6.0e-6 and 7.5e-6; by 10, by less than 3e-6.
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6, "intermediate_size": 35,
    "num_hidden_layers": 3, "vocab_size": 101, "max_position_embeddings": 21, "query_pre_attn_scalar": 100,
    "sliding_window": 5, "sliding_window_pattern": 3, **TOKENS,
}  # fmt: skip
SCALED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
CASES = {
    "Gemma3ForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "Gemma3ForCausalLM, scaled positions, capped logits, biases": Case(
        {
            **SIZES,
            "rope_parameters": SCALED,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        }
    ),
    "Gemma3TextModel": Case(SIZES),
    "Gemma3TextForSequenceClassification": Case({**SIZES, "num_labels": 11}),
}
