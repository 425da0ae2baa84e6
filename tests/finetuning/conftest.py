"""Tiny models of transformers with their tokenizers on disk, and files of pairs and texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import PRETRAINED, save_model, text


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(kind)`: the folder of a tiny "t5", "gpt2" or "bert" with its tokenizer."""
    made: dict[str, Path] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp(kind), PRETRAINED[kind], kind)
        return str(made[kind])

    return get


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The folder of pairs.json (repeat the first words), other.json (with other keys), labels.json and text.txt."""
    folder = tmp_path_factory.mktemp("files")
    sources = [text(seed, 3 + seed % 3) for seed in range(48)]
    pairs = [
        (source, " ".join(source.split()[: 1 + number % 2]))
        for number, source in enumerate(sources)
    ]
    write = {
        "pairs.json": [{"translation": {"s": s, "t": t}} for s, t in pairs],
        "other.json": [{"translation": {"en": s, "ro": t}} for s, t in pairs],
        "labels.json": [{"s": s, "t": int("red" in s or "blue" in s)} for s in sources],
        "names.json": [
            {"s": s, "t": "colour" if "red" in s or "blue" in s else "none"} for s in sources
        ],
    }
    for name, records in write.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text(text(0, 1200))
    return folder
