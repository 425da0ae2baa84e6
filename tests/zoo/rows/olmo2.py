"""OLMo 2: norms behind attention and MLP, and over the queries, and the keys, of all heads."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, **TOKENS,
}  # fmt: skip
CASES = {
    "Olmo2ForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "Olmo2ForCausalLM, tied, biases, grouped queries": Case(
        {**SIZES, "num_key_value_heads": 3, "tie_word_embeddings": True, "attention_bias": True},
        sizes=(1, 3),
    ),
    "Olmo2Model": Case(SIZES),
    "Olmo2ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
}
