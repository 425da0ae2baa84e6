"""mT5: gated GELU, an output head of its own."""

from matrix import Case

SIZES = {
    "d_model": 18, "d_kv": 8, "num_heads": 6, "d_ff": 48, "vocab_size": 193, "num_layers": 3, "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
CASES = {
    "MT5ForConditionalGeneration": Case(SIZES, untied=True),
    "MT5Model": Case(SIZES),
    "MT5EncoderModel": Case(SIZES),
    # So many labels that the error of bf16 is no matter of chance.
    "MT5ForSequenceClassification": Case({**SIZES, "num_labels": 20}),
    "MT5ForTokenClassification": Case({**SIZES, "num_labels": 3}),
    "MT5ForQuestionAnswering": Case(SIZES),
}
