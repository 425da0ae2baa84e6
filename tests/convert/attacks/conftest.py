"""Runs `shardzoo convert` on hostile folders and checks that it refuses them without a trace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


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
