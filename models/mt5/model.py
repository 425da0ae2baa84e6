"""mT5 (Xue et al., 2021, "mT5: A massively multilingual pre-trained text-to-text transformer"): T5 v1.1, untied."""

from __future__ import annotations

from ..t5.model import T5ForConditionalGeneration


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """The T5 model with an `MT5Config`."""
