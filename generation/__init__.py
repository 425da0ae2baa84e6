"""Generates text with the model of a folder, and fills masks and blanks.

The decoding itself is a part of the models, in `models/generation/`.
"""

from ..models.generation.generate import generate
from ..models.generation.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerateOutput,
)
from ..models.generation.settings import GenerationSettings
from .filling import BlankFills, MaskFills, fill_blanks, fill_mask
from .pipeline import TextGenerationPipeline

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
