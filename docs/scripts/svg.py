"""A drawing of boxes, arrows and lines of text, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

RANKS = ("#8ecae6", "#ffb703")  # the colors of rank 0 and rank 1
WHOLE = "#d9d9d9"  # what every rank has whole
INK, PAPER, LINE = "#1b1b1b", "#ffffff", "#555555"
LINE_HEIGHT = 17


class Drawing:
    """Elements are drawn in the order of the calls. All sizes are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="sans-serif" font-size="13" fill="{INK}">\n<title>{escape(title)}</title>\n'
        )
        self._elements: list[str] = []
        self.box(0, 0, width, height, PAPER, edge=PAPER)

    def box(
        self, x: float, y: float, width: float, height: float, color: str, edge: str = LINE
    ) -> None:
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}" stroke="{edge}"/>'
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", weight: str = "normal"
    ) -> None:
        """One line; y is its base line."""
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, texts: Sequence[str], anchor: str = "start") -> None:
        for number, words in enumerate(texts):
            self.text(x, y + number * LINE_HEIGHT, words, anchor)

    def labeled(
        self, x: float, y: float, width: float, height: float, color: str, texts: Sequence[str]
    ) -> None:
        """A box with lines of text in its middle."""
        self.box(x, y, width, height, color)
        first = y + height / 2 - (len(texts) - 1) * LINE_HEIGHT / 2 + 5
        self.lines(x + width / 2, first, texts, "middle")

    def arrow(self, x: float, y: float, to_x: float) -> None:
        """A horizontal arrow to the right."""
        self._elements.append(
            f'<path d="M{x:g} {y:g}H{to_x - 7:g}" stroke="{LINE}" stroke-width="2"/>'
            f'<path d="M{to_x:g} {y:g}l-9 -5v10z" fill="{LINE}"/>'
        )

    def legend(self, x: float, y: float) -> None:
        for color, words in (
            (RANKS[0], "rank 0"),
            (RANKS[1], "rank 1"),
            (WHOLE, "the same on both ranks"),
        ):
            self.box(x, y - 11, 14, 14, color)
            self.text(x + 20, y, words)
            x += 85

    def save(self, path: Path) -> None:
        path.write_text(self._head + "\n".join(self._elements) + "\n</svg>\n")
