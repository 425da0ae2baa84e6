"""ESM: rotary or learned positions, dropped tokens, padding without embeddings."""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 54, "vocab_size": 97,
    "max_position_embeddings": 40, "pad_token_id": 5, "mask_token_id": 9, "position_embedding_type": "rotary",
    "token_dropout": True, "layer_norm_eps": 1e-5,
}  # fmt: skip
LEARNED = {
    "position_embedding_type": "absolute",
    "token_dropout": False,
    "emb_layer_norm_before": True,
}
CASES = {
    "EsmForMaskedLM": Case(SIZES),
    "EsmForMaskedLM, learned positions": Case({**SIZES, **LEARNED}),
    "EsmModel": Case(SIZES),
    "EsmForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "EsmForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
