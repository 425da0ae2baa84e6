"""LongT5: an encoder with local attention, and one that attends to sums of blocks, too."""

from matrix import Case

SIZES = {
    "d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 36, "vocab_size": 129, "num_layers": 3, "num_decoder_layers": 1,
    "decoder_start_token_id": 0, "local_radius": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
}  # fmt: skip
V1_1 = {
    "d_model": 20, "d_kv": 7, "num_heads": 6, "d_ff": 30, "vocab_size": 131, "num_layers": 3, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "decoder_start_token_id": 7, "pad_token_id": 3, "local_radius": 4,
    "encoder_attention_type": "transient-global", "global_block_size": 2,
}  # fmt: skip
CASES = {
    "LongT5ForConditionalGeneration": Case(SIZES, sizes=(1, 2, 3, 4)),
    "LongT5ForConditionalGeneration, transient-global, version 1.1": Case(
        V1_1, untied=True, sizes=(1, 2, 3, 4)
    ),
    "LongT5ForConditionalGeneration, transient-global, groups of four": Case(
        {**V1_1, "global_block_size": 4, "local_radius": 1, "tie_word_embeddings": True}
    ),
    "LongT5Model": Case({**V1_1, "encoder_attention_type": "local"}),
    "LongT5Model, transient-global": Case(V1_1),
    "LongT5EncoderModel": Case(SIZES),
    "LongT5EncoderModel, transient-global": Case(
        {**SIZES, "encoder_attention_type": "transient-global", "global_block_size": 8}
    ),
}
