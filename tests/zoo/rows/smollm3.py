"""SmolLM3: layers that do not rotate, with and without windows."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "no_rope_layer_interval": 2, **TOKENS,
}  # fmt: skip
CASES = {
    "SmolLM3ForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "SmolLM3ForCausalLM, windows, chosen layers, untied, biases": Case(
        {
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 5,
            "no_rope_layers": [0, 1],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
        untied=True,
    ),
    "SmolLM3Model": Case(SIZES),
    "SmolLM3ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "SmolLM3ForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "SmolLM3ForQuestionAnswering": Case(SIZES, padding=("right", "")),
}
