"""ModernBERT's decoder: six heads, windows in two of three layers, each with its own rotation."""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 4, "intermediate_size": 54, "vocab_size": 131,
    "max_position_embeddings": 24, "local_attention": 10, "global_attn_every_n_layers": 2, "pad_token_id": 5,
    "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
CASES = {
    "ModernBertDecoderForCausalLM": Case(SIZES, sizes=(1, 2, 3, 4)),
    "ModernBertDecoderForCausalLM, biases": Case({**SIZES, **BIASES, "decoder_bias": False}),
    "ModernBertDecoderModel": Case({**SIZES, "attention_dropout": 0.2}),
    "ModernBertDecoderForSequenceClassification": Case({**SIZES, **BIASES, "num_labels": 3}),
}
