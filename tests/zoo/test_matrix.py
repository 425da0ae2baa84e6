"""Every architecture against transformers; `python tests/zoo/table.py` runs the whole matrix."""

from __future__ import annotations

import pytest
from matrix import architecture_of, check_case, load_rows

from shardzoo.models import FAMILIES, family

ROWS = load_rows()
BOTH = "sequence parallel and recompute"
LAYOUTS = [("plain", "fp32"), (BOTH, "fp32"), (BOTH, "dropout")]


@pytest.mark.parametrize("name", ROWS)
def test_equal_to_transformers(name, run_mesh, tmp_path):
    """At one tensor-parallel size, which differs from row to row, as does whether bf16 is compared, too."""
    layouts = LAYOUTS + [("plain", "bf16")] * (list(ROWS).index(name) % 4 == 0)
    split = [size for size in ROWS[name][1].sizes if size > 1]
    figures = check_case(name, ROWS[name], tmp_path, run_mesh, [split[len(name) % len(split)]], layouts)
    assert not figures.problems, "\n".join(figures.problems)


T5_HEADS = (
    "Model", "EncoderModel", "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering",
)  # fmt: skip
ENCODER_HEADS = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice",
)  # fmt: skip
DECODER_HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification")
WANTED = {
    **dict.fromkeys(("T5", "MT5", "UMT5"), T5_HEADS),
    **dict.fromkeys(("Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra"), ENCODER_HEADS),
    "Bert": (*ENCODER_HEADS, "ForPreTraining", "ForNextSentencePrediction"),
    "ModernBert": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    "GPT2": (*DECODER_HEADS, "LMHeadModel"),
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Glm4"), (*DECODER_HEADS, "ForCausalLM")),
    **dict.fromkeys(("Bart", "MBart"), ("Model", "ForConditionalGeneration", "ForSequenceClassification")),
    "M2M100": ("Model", "ForConditionalGeneration"),
}


def test_the_heads_of_each_family_load():
    """Those that users bring: with a row of the matrix, each loads and equals transformers' model."""
    wanted = {stem + head for stem, heads in WANTED.items() for head in heads}
    assert len(wanted) > 40
    assert wanted <= {architecture_of(name) for name in ROWS}


def test_every_architecture_has_a_row():
    covered = {architecture_of(name) for name in ROWS}
    lacking = [
        name for model_type in FAMILIES if family(model_type).in_transformers
        for name in family(model_type).architectures if name not in covered
    ]  # fmt: skip
    assert not lacking, "add rows to tests/zoo/rows/"
