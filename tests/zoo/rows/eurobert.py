"""EuroBERT: grouped queries, two poolings, a head with and without a bias."""

from matrix import Case

SIZES = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3, "vocab_size": 131,
    "intermediate_size": 54, "max_position_embeddings": 40, "pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2,
    "mask_token_id": 4,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES = {
    "EuroBertModel": Case(SIZES),
    "EuroBertForMaskedLM": Case({**SIZES, "tie_word_embeddings": True}),
    "EuroBertForMaskedLM, biases": Case({**SIZES, **BIASES}),
    "EuroBertForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "EuroBertForSequenceClassification, mean": Case(
        {**SIZES, **BIASES, "classifier_pooling": "mean"}
    ),
    "EuroBertForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
