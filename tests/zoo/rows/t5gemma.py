"""T5Gemma: an encoder-decoder of two Gemma 2s, which may have unequal widths."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
STACK = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 6, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "query_pre_attn_scalar": 10,
    "sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **TOKENS,
}  # fmt: skip
SIZES = {"encoder": STACK, "decoder": STACK, "vocab_size": 101, **TOKENS}
UNEQUAL = {
    **SIZES,
    "encoder": {**STACK, "hidden_size": 36, "num_key_value_heads": 3, "num_hidden_layers": 3},
    "decoder": {
        **STACK, "num_key_value_heads": 3, "attention_bias": True, "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "tie_word_embeddings": False,
}  # fmt: skip
DROPS = {"dropout_rate": 0.1, "attention_dropout": 0.1, "classifier_dropout_rate": 0.1}
# Decoders that read the source shifted by one have padding on the left that sees nothing.
CASES = {
    "T5GemmaForConditionalGeneration": Case(SIZES, sizes=(1, 2, 3, 4)),
    "T5GemmaForConditionalGeneration, unequal stacks, untied, biases, dropout": Case(
        {**UNEQUAL, **DROPS}, sizes=(1, 3)
    ),
    "T5GemmaModel": Case({**SIZES, **DROPS}),
    "T5GemmaEncoderModel": Case({**UNEQUAL, "is_encoder_decoder": False}),
    "T5GemmaForSequenceClassification": Case(
        {**SIZES, **DROPS, "num_labels": 11}, padding=("right", "")
    ),
    "T5GemmaForSequenceClassification, encoder alone": Case(
        {**UNEQUAL, **DROPS, "is_encoder_decoder": False, "num_labels": 11}, sizes=(1, 2, 3, 4)
    ),
    "T5GemmaForTokenClassification": Case({**SIZES, "num_labels": 5}, padding=("right", "")),
    "T5GemmaForTokenClassification, encoder alone": Case(
        {**SIZES, **DROPS, "is_encoder_decoder": False, "num_labels": 5}, sizes=(1, 2, 3, 4)
    ),
}
