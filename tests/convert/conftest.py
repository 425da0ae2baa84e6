"""Fixtures of the converter's tests: small checkpoints, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import stored_models


@pytest.fixture(scope="session")
def zoo() -> stored_models.Zoo:
    return stored_models.Zoo()


@pytest.fixture(scope="session")
def hashes():
    return stored_models.tensor_hashes


@pytest.fixture(scope="session")
def file_tree():
    return stored_models.tree


@pytest.fixture(scope="session")
def rewrite_header():
    return stored_models.rewrite_header


@pytest.fixture(scope="session")
def gpt2_folder(zoo, tmp_path_factory) -> Path:
    """A GPT-2 that is never written to."""
    return zoo.make(tmp_path_factory.mktemp("gpt2") / "hf", "gpt2")


@pytest.fixture(scope="session")
def gpt2_shards(gpt2_folder, tmp_path_factory) -> Path:
    """The same, in two ranks; never written to."""
    from shardzoo.convert.operations import split

    folder = tmp_path_factory.mktemp("shards") / "two"
    split(gpt2_folder, folder, 2)
    return folder
