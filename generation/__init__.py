"""Generates text with the model of a folder, and fills masks and blanks.

The decoding itself is a part of the models, in `models/generation/`.
"""

from typing import TYPE_CHECKING, Any

from ..models.generation.generate import generate
from ..models.generation.settings import GenerationSettings
from .filling import BlankFills, MaskFills, fill_blanks, fill_mask
from .pipeline import TextGenerationPipeline

if TYPE_CHECKING:
    from transformers.generation.utils import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
        GenerateOutput,
    )

__all__ = [
    "BlankFills",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerateOutput",
    "GenerationSettings",
    "MaskFills",
    "TextGenerationPipeline",
    "fill_blanks",
    "fill_mask",
    "generate",
]


def __getattr__(name: str) -> Any:
    """Returns a class of transformers' outputs, whose import takes seconds."""
    if not name.startswith("Generate") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.generation import utils

    return getattr(utils, name)
