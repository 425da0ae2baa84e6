"""CamemBERT: one segment, two heads, one layer."""

from matrix import Case

SIZES = {
    "hidden_size": 20, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 38, "vocab_size": 101,
    "max_position_embeddings": 17, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 6,
}  # fmt: skip
CASES = {
    "CamembertForMaskedLM": Case(SIZES, sizes=(1, 2)),
    "CamembertForSequenceClassification": Case({**SIZES, "num_labels": 1}, sizes=(1, 2)),
    "CamembertModel": Case(SIZES, sizes=(1, 2)),
    "CamembertForTokenClassification": Case({**SIZES, "num_labels": 3}, sizes=(1, 2)),
    "CamembertForMultipleChoice": Case(SIZES, sizes=(1, 2)),
    "CamembertForQuestionAnswering": Case(SIZES, sizes=(1, 2)),
}
