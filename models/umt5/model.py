"""UMT5 (Chung et al., 2023, "UniMax: Fairer and More Effective Language Sampling for Large-Scale Multilingual
Pretraining"): mT5 with a relative bias of its own in every layer."""

from __future__ import annotations

from ..t5.model import T5ForConditionalGeneration


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """The T5 model with a `UMT5Config`."""
