"""BERT: twelve heads and three segments; seven heads of size 6 with ReLU and another padding token."""

from matrix import Case

SIZES = {
    "hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 2, "intermediate_size": 84, "vocab_size": 129,
    "max_position_embeddings": 21, "type_vocab_size": 3,
}  # fmt: skip
OTHERS = {
    "hidden_size": 42, "num_attention_heads": 7, "num_hidden_layers": 1, "intermediate_size": 31, "vocab_size": 67,
    "max_position_embeddings": 18, "hidden_act": "relu", "pad_token_id": 5, "layer_norm_eps": 1e-5,
}  # fmt: skip
CASES = {
    "BertForMaskedLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "BertForMaskedLM, other sizes": Case(OTHERS, sizes=(1, 2, 3, 4)),
    "BertForPreTraining": Case(SIZES),
    "BertLMHeadModel": Case({**SIZES, "is_decoder": True}),
    "BertForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "BertModel": Case(SIZES),
    "BertForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "BertForMultipleChoice": Case(SIZES),
    "BertForNextSentencePrediction": Case(SIZES),
    "BertForQuestionAnswering": Case(SIZES),
    "BertForSequenceClassification, one number": Case(
        {**SIZES, "num_labels": 1, "hidden_act": "relu"}
    ),
    "BertForSequenceClassification, three numbers": Case(
        {**SIZES, "num_labels": 3, "problem_type": "regression"}
    ),
}
