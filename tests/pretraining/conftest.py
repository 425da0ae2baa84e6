"""Fixtures of the tests of pretraining: a small text, and configurations of every family."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tiny_models import WORDS, tiny


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder of 60 documents of 20 sentences each."""
    folder, chance = tmp_path_factory.mktemp("texts"), random.Random(1)
    for number in range(60):
        sentences = [
            " ".join(chance.choices(WORDS, k=chance.randint(5, 14))).capitalize() + "."
            for _ in range(20)
        ]
        (folder / f"{number}.txt").write_text(" ".join(sentences))
    return folder


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """`config(family, **changes)`: a folder with the config.json of a tiny model, whose dropout is the family's."""

    def make(family: str, **changes) -> Path:
        folder = tmp_path_factory.mktemp(family)
        (folder / "config.json").write_text(
            json.dumps(tiny(family, **{"layers": 1, "vocab_size": 420, **changes}))
        )
        return folder

    return make
