"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "examples/README.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
)


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its fence, from 1."""

    page: str
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """One shell command each, without comments, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            line.partition("  #")[0].strip() for line in lines if line and not line.startswith("#")
        ]


def blocks(page: str, language: str | None = None) -> list[Block]:
    """A page's blocks in order, of all languages or of one."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, *match.groups()))
    return [block for block in found if language in (None, block.language)]


def commands(page: str) -> list[str]:
    """The shell commands of a page in order."""
    return [command for block in blocks(page, "bash") for command in block.commands()]
