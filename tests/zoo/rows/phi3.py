"""Phi-3: stacked projections in the files, residual dropout, LongRoPE on a part of each head."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
CASES = {
    "Phi3ForCausalLM": Case({**SIZES, "resid_pdrop": 0.1}),
    "Phi3ForCausalLM, LongRoPE on half of each head, tied, window": Case(
        {
            **SIZES,
            "hidden_size": 48,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [1.2, 3.0],
            },
        },
        sizes=(1, 2, 3, 4),
    ),
    "Phi3Model": Case({**SIZES, "resid_pdrop": 0.1}),
    "Phi3ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "Phi3ForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
