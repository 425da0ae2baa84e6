"""DistilBERT: three heads, ReLU."""

from matrix import Case

SIZES = {
    "dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 42, "vocab_size": 131, "max_position_embeddings": 19,
    "activation": "relu",
}  # fmt: skip
CASES = {
    "DistilBertModel": Case(SIZES),
    "DistilBertForMaskedLM": Case(SIZES),
    "DistilBertForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "DistilBertForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "DistilBertForQuestionAnswering": Case(SIZES),
    "DistilBertForMultipleChoice": Case(SIZES),
}
