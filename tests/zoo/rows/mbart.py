"""mBART: learned positions, pre-LayerNorm after a norm of the embeddings."""

from matrix import Case

SIZES = {
    "d_model": 36, "encoder_layers": 1, "encoder_attention_heads": 6, "encoder_ffn_dim": 18, "decoder_layers": 2,
    "decoder_attention_heads": 6, "decoder_ffn_dim": 42, "vocab_size": 133, "max_position_embeddings": 17,
    "scale_embedding": True, "decoder_start_token_id": 5,
}  # fmt: skip
CASES = {
    "MBartForConditionalGeneration": Case(SIZES),
    "MBartModel": Case(SIZES),
    "MBartEncoder": Case(SIZES),
    "MBartForSequenceClassification": Case({**SIZES, "num_labels": 3}),
    "MBartForQuestionAnswering": Case(SIZES),
    "MBartForCausalLM": Case({**SIZES, "encoder_layers": 2}),
    "MBartModel, own embeddings": Case({**SIZES, "tie_word_embeddings": False}),
}
