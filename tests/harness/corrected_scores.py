"""Fills the corrections of a mixture's scores in transformers' models, which are buffers there."""

from __future__ import annotations

from typing import Any

import torch


def correct_scores(model: Any) -> None:
    """Draws corrections large enough to change the choice of many tokens, which bf16 cannot represent."""
    generator = torch.Generator().manual_seed(11)
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.normal_(0.0, 0.1, generator=generator)
