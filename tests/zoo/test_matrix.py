"""Every architecture against transformers; `python tests/zoo/table.py` runs the whole matrix."""

from __future__ import annotations

import importlib.util
from math import prod
from pathlib import Path

import pytest
from every_case import EVERY_CASE, by_turns
from matrix import architecture_of, check_case, list_sizes, load_rows, show_sizes

from shardzoo.models import FAMILIES, family

ROWS = load_rows()
BOTH = "sequence parallel and recompute"
LAYOUTS = [("plain", "fp32"), (BOTH, "fp32"), (BOTH, "dropout")]


@pytest.mark.parametrize("name", by_turns(ROWS, 12))
def test_equal_to_transformers(name, run_mesh, tmp_path):
    """In one layout, which differs from row to row, as does whether bf16 is compared, too.

    Every day, of each second row, most are compared with everything on alone, with dropout in turn, and one of three
    is converted; `make test-all` does the rest.
    """
    number = list(ROWS).index(name) // (1 if EVERY_CASE else 2)
    layouts = LAYOUTS if EVERY_CASE or number % 9 == 0 else LAYOUTS[1 + number % 2 :][:1]
    layouts = layouts + [("plain", "bf16")] * (number % (4 if EVERY_CASE else 8) == 0)
    most = 8 if EVERY_CASE or number % 9 == 0 else 3  # processes
    split = [sizes for sizes in list_sizes(name, ROWS[name]) if 1 < prod(sizes) <= most]
    size, converts = split[len(name) % len(split)], EVERY_CASE or number % 3 == 0
    if ROWS[name][1].obstacle:
        pytest.skip(ROWS[name][1].obstacle)
    figures = check_case(name, ROWS[name], tmp_path, run_mesh, [size], layouts, converts)
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
    "LongT5": ("Model", "EncoderModel", "ForConditionalGeneration"),
    "T5Gemma": (
        "Model",
        "EncoderModel",
        "ForConditionalGeneration",
        "ForSequenceClassification",
        "ForTokenClassification",
    ),
    "T5Gemma2": (
        "Model",
        "ForConditionalGeneration",
        "ForSequenceClassification",
        "ForTokenClassification",
    ),
    "Bert": (*ENCODER_HEADS, "ForPreTraining", "ForNextSentencePrediction"),
    "MegatronBert": (*ENCODER_HEADS, "ForPreTraining", "ForNextSentencePrediction", "ForCausalLM"),
    "EuroBert": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    "XLMRobertaXL": (*ENCODER_HEADS, "ForCausalLM"),
    "ModernBert": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    "GPT2": (*DECODER_HEADS, "LMHeadModel"),
    **dict.fromkeys(
        (
            "Llama",
            "Mistral",
            "Qwen2",
            "Qwen3",
            "Glm4",
            "Mixtral",
            "Qwen2Moe",
            "Qwen3Moe",
            "Phi3",
            "SmolLM3",
            "Gemma",
            "Gemma2",
        ),
        (*DECODER_HEADS, "ForCausalLM"),
    ),
    "Granite": ("Model", "ForCausalLM"),
    "Esm": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    "DebertaV2": ENCODER_HEADS,
    **dict.fromkeys(("Olmo2", "Olmo3"), ("Model", "ForCausalLM", "ForSequenceClassification")),
    "ModernBertDecoder": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "Gemma3": ("ForCausalLM", "TextModel", "TextForSequenceClassification"),
    **dict.fromkeys(
        ("Bart", "MBart"), ("Model", "ForConditionalGeneration", "ForSequenceClassification")
    ),
    "Pegasus": ("Model", "ForConditionalGeneration", "ForCausalLM"),
    "Marian": ("Model", "MTModel", "ForCausalLM"),
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


def test_the_table_of_the_docs_has_the_rows_of_the_matrix():
    """Run `make parity ARGS=--write` to renew it."""
    table = load_table()
    cases, architectures, rows = table.written()
    assert [tuple(row[:3]) for row in rows] == [
        (
            *table.title(name, row[0]),
            " ".join(show_sizes(*sizes) for sizes in list_sizes(name, row)),
        )
        for name, row in ROWS.items()
    ]
    assert (cases, architectures) == (len(ROWS), len({architecture_of(name) for name in ROWS}))
    assert not [row for row in rows if "no" in row]


def test_the_table_is_written_between_its_marks(tmp_path):
    table = load_table()
    original, table.PAGE = table.PAGE.read_text(), tmp_path / "models.md"
    table.PAGE.write_text(original)
    names = list(ROWS)[:2]
    table.write(
        names, [table.line(name, *ROWS[name], table.Figures(outputs=2e-7)) for name in names]
    )
    cases, _, rows = table.written()
    assert cases == 2
    assert [row[1] for row in rows] == [table.title(name, ROWS[name][0])[1] for name in names]
    begin, end = original.index(table.BEGIN), original.index(table.END)
    changed = table.PAGE.read_text()
    assert changed.startswith(original[:begin])
    assert changed.endswith(original[end:])


def load_table():
    """The script as a module of its own."""
    spec = importlib.util.spec_from_file_location(
        "parity_table", Path(__file__).parent / "table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
