"""Fixtures of the tests of checkpoint/ and convert/: small checkpoints, what is in them, and a place to attack them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import stored_models
import torch
from safetensors.torch import load_file


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


class Arena:
    """folder: where everything of one attack lies. destination: what a conversion would make."""

    def __init__(self, folder: Path, file_tree, capsys) -> None:
        self.folder, self._file_tree, self._capsys = folder, file_tree, capsys
        self.destination = folder / "destination"

    def copy(self, original: Path) -> Path:
        target = self.folder / "source"
        shutil.copytree(original, target)
        return target

    def convert(self, *arguments: object) -> tuple[int, str]:
        """Exit code and what was printed to stderr."""
        from shardzoo.cli.convert import main

        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, self._capsys.readouterr().err

    def converted(self, source: Path) -> dict[str, torch.Tensor]:
        """Splits a folder in two, merges the ranks again, and returns the tensors."""
        merged = self.folder / "merged"
        code, message = self.convert("split", source, self.destination, "--tp", 2)
        assert code == 0, message
        code, message = self.convert("merge", self.destination, merged)
        assert code == 0, message
        return load_file(merged / "model.safetensors")

    def refused(self, *arguments: object) -> str:
        """Runs a command that must exit with 2 and change nothing on disk; returns its message."""
        before, entries = self._file_tree(self.folder), self._entries()
        code, message = self.convert(*arguments)
        assert code == 2, message
        assert self._file_tree(self.folder) == before
        assert self._entries() == entries, "something was left behind"
        assert message.startswith("error: ")
        assert "Traceback" not in message
        return message

    def refused_split(self, source: Path, size: int = 2) -> str:
        return self.refused("split", source, self.destination, "--tp", size)

    def refused_merge(self, source: Path) -> str:
        return self.refused("merge", source, self.destination)

    def _entries(self) -> list[Path]:
        return sorted(self.folder.rglob("*"))


@pytest.fixture
def arena(tmp_path, file_tree, capsys) -> Arena:
    return Arena(tmp_path, file_tree, capsys)
