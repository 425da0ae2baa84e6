"""UMT5: a relative bias in every layer; few buckets, so that distances share them."""

from matrix import Case

SIZES = {
    "d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 36, "vocab_size": 131, "num_layers": 3, "num_decoder_layers": 2,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11,
}  # fmt: skip
CASES = {
    "UMT5ForConditionalGeneration": Case(SIZES, sizes=(1, 2, 3, 4)),
    "UMT5Model": Case(SIZES),
    "UMT5EncoderModel": Case(SIZES),
    "UMT5ForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "UMT5ForTokenClassification": Case({**SIZES, "num_labels": 3}),
    "UMT5ForQuestionAnswering": Case(SIZES),
}
