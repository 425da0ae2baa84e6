"""T5 1.0 (ReLU, tied head) and 1.1 (gated GELU, own head), with stacks of unequal depth."""

from matrix import Case

SIZES = {
    "d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 36, "vocab_size": 129, "num_layers": 3, "num_decoder_layers": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
V1_1 = {
    "d_model": 20, "d_kv": 7, "num_heads": 6, "d_ff": 30, "vocab_size": 131, "num_layers": 3, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "decoder_start_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
CASES = {
    "T5ForConditionalGeneration": Case(SIZES, sizes=(1, 2, 3, 4)),
    "T5ForConditionalGeneration, version 1.1": Case(V1_1, untied=True),
    "T5Model": Case(V1_1),
    "T5EncoderModel": Case(SIZES),
    "T5ForSequenceClassification": Case({**V1_1, "num_labels": 3}),
    "T5ForSequenceClassification, regression": Case({**SIZES, "num_labels": 1}),
    "T5ForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "T5ForQuestionAnswering": Case(V1_1),
}
