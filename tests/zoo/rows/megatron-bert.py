"""Megatron-BERT: six heads, norms before attention and MLP; another size with ReLU and another padding token."""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 60, "vocab_size": 131,
    "max_position_embeddings": 21, "type_vocab_size": 3,
}  # fmt: skip
OTHERS = {
    "hidden_size": 42, "num_attention_heads": 7, "num_hidden_layers": 1, "intermediate_size": 31, "vocab_size": 67,
    "max_position_embeddings": 18, "hidden_act": "relu", "pad_token_id": 5, "layer_norm_eps": 1e-5,
}  # fmt: skip
CASES = {
    "MegatronBertForMaskedLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "MegatronBertForMaskedLM, other sizes": Case(OTHERS, sizes=(1, 2, 3, 4)),
    "MegatronBertForCausalLM": Case({**SIZES, "is_decoder": True}),
    "MegatronBertForPreTraining": Case(SIZES),
    "MegatronBertForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "MegatronBertModel": Case(SIZES),
    "MegatronBertForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "MegatronBertForMultipleChoice": Case(SIZES),
    "MegatronBertForNextSentencePrediction": Case(SIZES),
    "MegatronBertForQuestionAnswering": Case(
        {**SIZES, "hidden_size": 48, "num_attention_heads": 12}
    ),
}
