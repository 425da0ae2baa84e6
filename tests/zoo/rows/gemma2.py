"""Gemma 2: capped scores and logits, windows in each second layer, norms of all outputs."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6, "intermediate_size": 35,
    "num_hidden_layers": 3, "vocab_size": 101, "max_position_embeddings": 21, "query_pre_attn_scalar": 9,
    "sliding_window": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, **TOKENS,
}  # fmt: skip
CASES = {
    "Gemma2ForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "Gemma2ForCausalLM, no caps, other layers, biases, dropout": Case(
        {
            **SIZES,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
            "attention_dropout": 0.2,
        }
    ),
    "Gemma2Model": Case({**SIZES, "attention_dropout": 0.2}),
    "Gemma2ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Gemma2ForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
