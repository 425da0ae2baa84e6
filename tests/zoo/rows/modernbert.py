"""ModernBERT: six heads, a window smaller than the sequence, every second layer global."""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 4, "intermediate_size": 54, "vocab_size": 131,
    "max_position_embeddings": 24, "local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 5,
    "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
NEAR = {
    **SIZES,
    "local_attention": 12,
}  # padding far from all tokens, whose state is arbitrary, would count in the loss
MEAN = {"classifier_pooling": "mean", "norm_bias": True, "attention_bias": True, "mlp_bias": True}
CASES = {
    "ModernBertModel": Case(SIZES),
    "ModernBertForMaskedLM": Case(SIZES),
    "ModernBertForMaskedLM, biases": Case(
        {**SIZES, **MEAN, "classifier_bias": True, "decoder_bias": False}
    ),
    "ModernBertForSequenceClassification": Case({**NEAR, "num_labels": 3}),
    "ModernBertForSequenceClassification, mean": Case({**SIZES, **MEAN}),
    "ModernBertForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "ModernBertForQuestionAnswering": Case(NEAR),
    "ModernBertForMultipleChoice": Case(SIZES),
}
