"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotary frequencies are not scaled."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 35,
    "num_hidden_layers": 4, "vocab_size": 101, "max_position_embeddings": 21, "sliding_window": 5, **TOKENS,
}  # fmt: skip
SCALED = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "attention_factor": 1.2,
        "original_max_position_embeddings": 8,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}  # fmt: skip
CASES = {
    "Olmo3ForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "Olmo3ForCausalLM, scaled positions, tied, biases, grouped queries": Case(
        {
            **SIZES,
            "num_hidden_layers": 2,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": SCALED,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        sizes=(1, 3),
    ),
    "Olmo3Model": Case(SIZES),
    "Olmo3ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
}
