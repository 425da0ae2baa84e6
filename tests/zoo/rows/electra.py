"""ELECTRA: embeddings narrower than the hidden states, or as wide."""

from matrix import Case

SIZES = {
    "embedding_size": 20, "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 42,
    "vocab_size": 129, "max_position_embeddings": 21, "hidden_act": "gelu_new",
}  # fmt: skip
CASES = {
    "ElectraModel": Case(SIZES),
    "ElectraForMaskedLM": Case(SIZES),
    "ElectraForCausalLM": Case({**SIZES, "is_decoder": True}),
    "ElectraForPreTraining": Case(SIZES),
    "ElectraForSequenceClassification": Case({**SIZES, "embedding_size": 36, "num_labels": 3}),
    "ElectraForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "ElectraForQuestionAnswering": Case(SIZES),
    "ElectraForMultipleChoice": Case(SIZES),
}
