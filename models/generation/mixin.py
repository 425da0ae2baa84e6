"""Gives the models their `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from torch import Tensor

from ..blocks.stack import BlockList
from .generation_config import GenerationConfig

if TYPE_CHECKING:
    from .generate import GenerateOutput

Generates = Literal["continuation", "answer", "blanks", "masks"]


class GenerationMixin:
    """A base of the models that generate tokens."""

    generates: ClassVar[Generates]
    """What the model generates: the continuation of a prompt, an encoder-decoder's answer to a
    prompt, the text of blanks, or the tokens at masked positions."""

    _generation_config: GenerationConfig | None = None

    @property
    def generation_config(self) -> GenerationConfig:
        """The settings of `generate` that a call does not name.

        They are those of the folder from which the model was loaded, or else of its configuration.
        """
        if self._generation_config is None:
            self._generation_config = GenerationConfig.from_config(cast(Any, self).config)
        return self._generation_config

    @generation_config.setter
    def generation_config(self, settings: GenerationConfig) -> None:
        self._generation_config = settings

    @property
    def decoder_blocks(self) -> BlockList:
        """The blocks that read the generated tokens."""
        return cast(Any, self).blocks

    def generate(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor | GenerateOutput:
        """Generates sequences, like transformers' `generate`; see `shardzoo.generation.generate`
        for the options.
        """
        from .generate import generate

        return generate(self, input_ids, attention_mask, **options)
