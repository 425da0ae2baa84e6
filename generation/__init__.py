"""Generates text with the model of a folder, and fills masks and blanks.

The decoding itself is a part of the models, in `models/generation/`.
"""

from typing import Any

from ..models.generation.generate import generate
from ..models.generation.settings import GenerationSettings
from .filling import BlankFills, MaskFills, fill_blanks, fill_mask
from .pipeline import TextGenerationPipeline

__all__ = [
    "BlankFills",
    "GenerationSettings",
    "MaskFills",
    "TextGenerationPipeline",
    "fill_blanks",
    "fill_mask",
    "generate",
]


# The classes of transformers that `generate` returns.
OUTPUTS = (
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerateOutput",
)


def __getattr__(name: str) -> Any:
    """Returns a class of transformers' outputs, whose import takes seconds."""
    if name not in OUTPUTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.generation import utils

    return getattr(utils, name)
