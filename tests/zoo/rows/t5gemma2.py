"""T5Gemma 2: an encoder-decoder of two Gemma 3s, whose decoder attends to both at once."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
# As in gemma3_text.py: normalized queries and keys make large scores, which a large divisor keeps from one key alone.
STACK = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 6, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "query_pre_attn_scalar": 100,
    "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], **TOKENS,
}  # fmt: skip
# transformers builds the part that reads images, too, which texts do not use.
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
IMAGES = {"vision_config": VISION, "mm_tokens_per_image": 4, "eoi_token_index": 99}
SIZES = {
    "encoder": {"text_config": STACK, **IMAGES},
    "decoder": {**STACK, "final_logit_softcapping": 3.0},
    "image_token_index": 100,
    **TOKENS,
}
GROUPED = {**STACK, "num_key_value_heads": 3, "attention_bias": True}
OTHER = {
    **SIZES,
    "encoder": {
        "text_config": {**GROUPED, "num_hidden_layers": 3, "layer_types": None, "sliding_window": 3},
        **IMAGES,
    },
    "decoder": {**GROUPED, "num_attention_heads": 12, "intermediate_size": 33},
}  # fmt: skip
DROPS = {"dropout_rate": 0.1, "attention_dropout": 0.1, "classifier_dropout_rate": 0.1}
CASES = {
    "T5Gemma2ForConditionalGeneration": Case(SIZES, sizes=(1, 2, 3, 4)),
    "T5Gemma2ForConditionalGeneration, unequal stacks, grouped queries, biases, dropout": Case(
        {**OTHER, **DROPS}, sizes=(1, 2, 3)
    ),
    "T5Gemma2Model": Case({**SIZES, **DROPS}),
    "T5Gemma2ForSequenceClassification": Case(
        {**SIZES, **DROPS, "num_labels": 11}, padding=("right", "")
    ),
    "T5Gemma2ForTokenClassification": Case({**SIZES, "num_labels": 5}, padding=("right", "")),
}
