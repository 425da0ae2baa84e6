"""The code of docs/generation.md that needs no checkpoint runs and says what it says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "generation.md"


def test_the_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    first, loop = blocks[0], next(block for block in blocks if "Cache(" in block)
    names: dict = {}
    exec(first, names)
    assert names["tokens"].shape[1] <= 12
    exec(loop, names)
    whole = names["model"](torch.cat([names["prompts"][1:], names["token"]], 1)).logits[:, -1:]
    torch.testing.assert_close(names["second"].logits, whole, rtol=1e-4, atol=1e-5)
