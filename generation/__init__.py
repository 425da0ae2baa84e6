"""Generates text under tensor parallelism.

Each name is imported at its first use. Importing the package adds a `generate` method to every language model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ..models.language_model import LanguageModel

if TYPE_CHECKING:
    from .api import GenerateOutput, generate
    from .filling import BlankFills, MaskFills, fill_blanks, fill_mask
    from .pipeline import TextGenerationPipeline
    from .settings import GenerationSettings

_MODULES = {
    "BlankFills": "filling",
    "GenerateOutput": "api",
    "GenerationSettings": "settings",
    "MaskFills": "filling",
    "TextGenerationPipeline": "pipeline",
    "fill_blanks": "filling",
    "fill_mask": "filling",
    "generate": "api",
}
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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _generate(self: LanguageModel, *args: Any, **kwargs: Any) -> Any:
    """Generates sequences; see `shardzoo.generation.generate`."""
    from .api import generate

    return generate(self, *args, **kwargs)


cast(Any, LanguageModel).generate = _generate
