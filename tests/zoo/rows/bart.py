"""BART: learned positions, post-LayerNorm, stacks of unequal depth, heads and inner widths."""

from matrix import Case

SIZES = {
    "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 36, "decoder_layers": 1,
    "decoder_attention_heads": 12, "decoder_ffn_dim": 30, "vocab_size": 101, "max_position_embeddings": 20,
}  # fmt: skip
CASES = {
    "BartForConditionalGeneration": Case({**SIZES, "forced_bos_token_id": 0}),
    "BartForConditionalGeneration, scaled": Case(
        {**SIZES, "scale_embedding": True, "activation_function": "gelu_new"}
    ),
    "BartModel": Case(SIZES),
    "BartEncoder": Case(SIZES),
    "BartForSequenceClassification": Case(SIZES),
    "BartForQuestionAnswering": Case(SIZES),
    "BartForCausalLM": Case(SIZES),
    "BartForConditionalGeneration, own embeddings": Case({**SIZES, "tie_word_embeddings": False}),
}
