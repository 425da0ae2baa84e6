"""Generates text with the model of a folder, and fills masks and blanks.

The decoding itself is a part of the models, in `models/generation/`.
"""

from ..models.generation.generate import GenerateOutput, generate
from ..models.generation.settings import GenerationSettings
from .filling import BlankFills, MaskFills, fill_blanks, fill_mask
from .pipeline import TextGenerationPipeline

__all__ = [
    "BlankFills",
    "GenerateOutput",
    "GenerationSettings",
    "MaskFills",
    "TextGenerationPipeline",
    "fill_blanks",
    "fill_mask",
    "generate",
]
