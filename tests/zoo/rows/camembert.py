"""CamemBERT: one segment, five heads of size 4, one layer."""

from matrix import Case

SIZES = {
    "hidden_size": 20, "num_attention_heads": 5, "num_hidden_layers": 1, "intermediate_size": 38, "vocab_size": 101,
    "max_position_embeddings": 17, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 6,
}  # fmt: skip
CASES = {
    "CamembertForMaskedLM": Case(SIZES),
    "CamembertForSequenceClassification": Case({**SIZES, "num_labels": 1}),
    "CamembertForCausalLM": Case({**SIZES, "is_decoder": True, "max_position_embeddings": 21}),
    "CamembertModel": Case(SIZES),
    "CamembertForTokenClassification": Case({**SIZES, "num_labels": 3}),
    "CamembertForMultipleChoice": Case(SIZES),
    "CamembertForQuestionAnswering": Case(SIZES),
}
