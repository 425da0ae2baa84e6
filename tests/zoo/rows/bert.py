"""BERT: twelve heads, a vocabulary that is 1 modulo 64, three segments."""

from matrix import Case

SIZES = {
    "hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 2, "intermediate_size": 84, "vocab_size": 129,
    "max_position_embeddings": 21, "type_vocab_size": 3,
}  # fmt: skip
CASES = {
    "BertForMaskedLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "BertForPreTraining": Case(SIZES),
    "BertForSequenceClassification": Case({**SIZES, "num_labels": 3}),
}
