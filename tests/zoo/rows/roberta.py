"""RoBERTa: six heads, tanh GELU, another padding token."""

from matrix import Case

SIZES = {
    "hidden_size": 30, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 42, "vocab_size": 131,
    "max_position_embeddings": 24, "hidden_act": "gelu_new", "pad_token_id": 5,
}  # fmt: skip
CASES = {
    "RobertaForMaskedLM": Case(SIZES),
    "RobertaForSequenceClassification": Case(
        {**SIZES, "num_labels": 5, "problem_type": "multi_label_classification"}
    ),
    "RobertaForCausalLM": Case({**SIZES, "is_decoder": True}),
    "RobertaModel": Case(SIZES),
    "RobertaForTokenClassification": Case({**SIZES, "num_labels": 3}),
    "RobertaForMultipleChoice": Case(SIZES),
    "RobertaForQuestionAnswering": Case(SIZES),
}
