"""Defines LongT5's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config import PositionCount
from ..t5.config import T5Config

PRETRAINED_LENGTH = 4096  # positions are relative, so longer sequences also work


@dataclass
class LongT5Config(T5Config):
    """The sizes and constants of a LongT5. Names, meanings and defaults are those of transformers.

    Attributes:
        encoder_attention_type: What the encoder's tokens attend to: their neighbors ("local"), or
            the sums of blocks of tokens, too ("transient-global").
        local_radius: The distance to the farthest neighbor.
        global_block_size: The number of tokens in such a sum.
    """

    model_type: ClassVar[str] = "longt5"

    local_radius: PositionCount = 127
    global_block_size: PositionCount = 16
    encoder_attention_type: Literal["local", "transient-global"] = "local"
    architecture: str = "LongT5ForConditionalGeneration"

    @property
    def sums_blocks(self) -> bool:
        """Whether the encoder's tokens attend to the sums of blocks of tokens."""
        return self.encoder_attention_type == "transient-global"

    @property
    def block_length(self) -> int:
        """The number of queries that local attention computes together."""
        return self.local_radius + 1

    @property
    def max_sequence_length(self) -> int:
        return PRETRAINED_LENGTH
