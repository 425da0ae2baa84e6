"""XLM-RoBERTa: three heads, two segments as in multilingual sentence pairs."""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 54, "vocab_size": 140,
    "max_position_embeddings": 20, "pad_token_id": 1,
}  # fmt: skip
CASES = {
    "XLMRobertaForMaskedLM": Case(SIZES),
    "XLMRobertaForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "XLMRobertaForCausalLM": Case({**SIZES, "is_decoder": True}),
    "XLMRobertaModel": Case(SIZES),
    "XLMRobertaForTokenClassification": Case({**SIZES, "num_labels": 3}),
    "XLMRobertaForMultipleChoice": Case(SIZES),
    "XLMRobertaForQuestionAnswering": Case(SIZES),
}
