"""XLM-RoBERTa-XL: all heads; a final norm, no norm of the embeddings."""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 54, "vocab_size": 140,
    "max_position_embeddings": 20, "pad_token_id": 1, "type_vocab_size": 2,
}  # fmt: skip
CASES = {
    "XLMRobertaXLForMaskedLM": Case(SIZES),
    "XLMRobertaXLForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "XLMRobertaXLForCausalLM": Case({**SIZES, "is_decoder": True}),
    "XLMRobertaXLModel": Case(SIZES),
    "XLMRobertaXLForTokenClassification": Case({**SIZES, "num_labels": 3}),
    "XLMRobertaXLForMultipleChoice": Case(SIZES),
    "XLMRobertaXLForQuestionAnswering": Case(SIZES),
}
