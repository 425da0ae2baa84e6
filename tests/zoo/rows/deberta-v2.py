"""DeBERTa-v2: scores with terms of relative positions, in buckets or not, by shared projections or their own.

A padded query attends to nothing in transformers, so padding is on the right, and answers are found in whole rows.
"""

from matrix import Case

SIZES = {
    "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 54, "vocab_size": 101,
    "max_position_embeddings": 32, "relative_attention": True, "position_buckets": 6, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False,
}  # fmt: skip
OWN = {
    "share_att_key": False, "position_buckets": -1, "max_relative_positions": 7, "norm_rel_ebd": "none",
    "position_biased_input": True, "type_vocab_size": 2,
}  # fmt: skip
RIGHT = ("right", "")
CASES = {
    "DebertaV2Model": Case(SIZES, padding=RIGHT),
    "DebertaV2ForMaskedLM": Case(SIZES, padding=RIGHT),
    "DebertaV2ForMaskedLM, projections of positions, segments": Case(
        {**SIZES, **OWN}, padding=RIGHT
    ),
    "DebertaV2ForMaskedLM, content to position alone": Case(
        {**SIZES, "share_att_key": False, "pos_att_type": ["c2p"]}, padding=RIGHT
    ),
    "DebertaV2ForSequenceClassification": Case({**SIZES, "num_labels": 3}, padding=RIGHT),
    "DebertaV2ForTokenClassification": Case({**SIZES, "num_labels": 5}, padding=RIGHT),
    "DebertaV2ForQuestionAnswering": Case(SIZES, padding=("",)),
    "DebertaV2ForMultipleChoice": Case(SIZES, padding=RIGHT),
}
