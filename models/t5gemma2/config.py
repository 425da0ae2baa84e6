"""Defines T5Gemma 2's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from typing_extensions import Self

from ..config import TokenId, VocabSize, shown
from ..gemma2.config import Gemma2Config
from ..gemma3_text.config import Gemma3TextConfig
from ..t5gemma.config import T5GemmaConfig


@dataclass
class T5Gemma2TextConfig(Gemma3TextConfig):
    """The sizes and constants of a stack, which are those of a Gemma 3."""

    model_type: ClassVar[str] = "t5gemma2_text"


@dataclass
class T5Gemma2Config(T5GemmaConfig):
    """The sizes and constants of a T5Gemma 2. Names, meanings and defaults are those of transformers.

    Attributes:
        encoder: The `text_config` of a file's `encoder`.
        encoder_settings: The other keys of that object. They belong to the part that reads images,
            which the zoo does not have; they are kept for files.
        eoi_token_index: The token that ends an image, which has an embedding of its own. In a file
            it is a key of `encoder`.
    """

    model_type: ClassVar[str] = "t5gemma2"
    stack_config: ClassVar[type[Gemma2Config]] = T5Gemma2TextConfig

    vocab_size: VocabSize = 262208
    eoi_token_index: TokenId = 256000
    encoder_settings: dict[str, object] = field(default_factory=dict[str, object])
    architecture: str = "T5Gemma2ForConditionalGeneration"

    def __post_init__(self) -> None:
        if self.is_encoder_decoder is False:
            raise ValueError("a T5Gemma 2 has both stacks: is_encoder_decoder must be true")
        super().__post_init__()
        if not self.tie_word_embeddings:
            raise ValueError(
                "both stacks and the head of a T5Gemma 2 have one embedding: tie_word_embeddings "
                "must be true"
            )
        widths = self.encoder_config.hidden_size, self.decoder_config.hidden_size
        if widths[0] != widths[1]:
            raise ValueError(
                f"both stacks of a T5Gemma 2 must have the same hidden_size, not {widths[0]} and "
                f"{widths[1]}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        encoder = values.get("encoder")
        if isinstance(encoder, Mapping):
            settings = dict(cast(Mapping[str, Any], encoder))
            values["encoder"] = settings.pop("text_config", None)
            values["eoi_token_index"] = settings.pop("eoi_token_index", cls.eoi_token_index)
            settings.pop("model_type", None)
            values["encoder_settings"] = settings
        elif encoder is not None and not isinstance(encoder, cls.stack_config):
            raise ValueError(f"encoder must be an object, not {shown(encoder)}")
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["encoder"] = {
            **values.pop("encoder_settings"),
            "model_type": "t5gemma2_encoder",
            "text_config": values["encoder"],
            "eoi_token_index": self.eoi_token_index,
        }
        values["decoder"]["model_type"] = "t5gemma2_decoder"
        return values
