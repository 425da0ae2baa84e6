"""Makes the default data and models of the examples: text that every machine has, and very small models."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardzoo.data import python_stdlib, train_byte_level_bpe, train_sentencepiece, train_wordpiece
from shardzoo.trainer.launch.ranks import on_first_rank

PACKAGES = ("asyncio", "email", "importlib", "logging")
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
SIZES = {
    "t5": T5,
    "mt5": T5,
    "bert": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
KINDS = {
    "t5": ("T5ForConditionalGeneration", train_sentencepiece),
    "mt5": ("MT5ForConditionalGeneration", train_sentencepiece),
    "bert": ("BertForPreTraining", train_wordpiece),
    "gpt2": ("GPT2LMHeadModel", train_byte_level_bpe),
}
ROMANIAN = """și în că să mă țară fără până când ploaia vântul munți brazi pădure dimineață învățătoare copii mănâncă
pâine cărți scriu își amintește despre războaie împărați sălbatici știință frumusețe încă trăiește aici astăzi"""


class Docstring(NamedTuple):
    package: str
    title: str
    text: str


@cache
def docstrings() -> list[Docstring]:
    """Returns docstrings of several paragraphs from a few standard library packages, always in the same order."""
    found = []
    for path in python_stdlib():
        package = next((name for name in PACKAGES if name in path.parts), None)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if package else ():
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                title, _, text = (ast.get_docstring(node) or "").partition("\n\n")
                if text:
                    found.append(
                        Docstring(package, " ".join(title.split()), " ".join(text.split()))
                    )
    return found


def sentences(count: int) -> list[str]:
    """Returns sentences of random Romanian words, the same on every call."""
    generator = random.Random(0)
    drawn = (generator.choices(ROMANIAN.split(), k=generator.randint(4, 12)) for _ in range(count))
    return [" ".join(words).capitalize() + "." for words in drawn]


def json_lines(records: Sequence[object], path: Path) -> Path:
    """Writes a file with one record per line and returns its path. Every rank may call it; the first one writes."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    on_first_rank(write)
    return path


def checkpoint(
    model_type: str, texts: Sequence[str], folder: Path, *, vocab_size: int = 600
) -> Path:
    """Makes a Hugging Face folder of a small random model and a tokenizer trained on the texts, and returns its path.

    Every rank may call it; only the first one makes the folder, unless it exists.
    """

    def make() -> None:
        import transformers

        if folder.exists():
            return
        architecture, train_tokenizer = KINDS[model_type]
        partial = folder.with_suffix(".partial")
        tokenizer = train_tokenizer(texts, vocab_size, partial)
        sizes = {**SIZES[model_type], "vocab_size": tokenizer.vocab_size}
        transformers.set_seed(0)
        model = getattr(transformers, architecture)(
            transformers.AutoConfig.for_model(model_type, **sizes)
        )
        model.save_pretrained(partial)
        partial.rename(folder)

    on_first_rank(make)
    return folder
