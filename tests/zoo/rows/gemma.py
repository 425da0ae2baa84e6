"""Gemma: norms that add 1 to their weights, scaled embeddings, heads wider than the states."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
CASES = {
    "GemmaForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "GemmaForCausalLM, untied, biases, one key-value head": Case(
        {
            **SIZES,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
        },
        untied=True,
    ),
    "GemmaModel": Case(SIZES),
    "GemmaForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "GemmaForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
