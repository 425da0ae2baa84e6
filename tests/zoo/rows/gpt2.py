"""GPT-2: heads that do not divide, an inner width of its own; attention scaled by the layer, an untied head."""

from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
SIZES = {
    "n_embd": 30,
    "n_head": 5,
    "n_layer": 2,
    "n_inner": 121,
    "vocab_size": 129,
    "n_positions": 21,
    **TOKENS,
}
CASES = {
    "GPT2LMHeadModel": Case(SIZES, sizes=(1, 2, 3, 4)),
    "GPT2LMHeadModel, untied, scaled by layer": Case(
        {
            **SIZES,
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
        }
    ),
    "GPT2DoubleHeadsModel": Case({**SIZES, "summary_first_dropout": 0.0}),
    "GPT2Model": Case(SIZES),
    "GPT2ForSequenceClassification": Case({**SIZES, "num_labels": 3}, sizes=(1, 2, 3, 4)),
    "GPT2ForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "GPT2ForQuestionAnswering": Case(SIZES, padding=("right", "")),
}
