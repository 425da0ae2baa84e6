"""Defines Qwen2's configuration, with the keys of Hugging Face's `config.json`, and what Qwen3's
shares with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..config import HeadCount, InnerSize, PositionCount, Range, VocabSize
from ..llama.config import DecoderConfig

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass
class QwenConfig(DecoderConfig):
    """The sizes and constants that Qwen2 and Qwen3 share. Names, meanings and defaults are those of
    transformers.

    Attributes:
        sliding_window: The window of the layers of type "sliding_attention", if
            `use_sliding_window`.
        layer_types: Of each layer; by default the layers from `max_window_layers` on are
            "sliding_attention".
    """

    vocab_size: VocabSize = 151936
    intermediate_size: InnerSize = 22016
    num_key_value_heads: HeadCount | None = 32
    max_position_embeddings: PositionCount = 32768
    use_sliding_window: bool = False
    sliding_window: PositionCount | None = 4096
    max_window_layers: Annotated[int, Range(0, 512)] = 28
    layer_types: list[LayerType] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if "sliding_attention" in self.layer_types and not self.window:
            raise ValueError(
                "layers of type sliding_attention need use_sliding_window=true and a sliding_window"
            )

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is not None:
            return tuple(
                self.window if kind == "sliding_attention" else None for kind in self.layer_types
            )
        return tuple(
            self.window if i >= self.max_window_layers else None
            for i in range(self.num_hidden_layers)
        )


@dataclass
class Qwen2Config(QwenConfig):
    """A configuration of Qwen2 or Qwen2.5."""

    model_type: ClassVar[str] = "qwen2"

    architecture: str = "Qwen2ForCausalLM"

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def output_bias(self) -> bool:
        return False
