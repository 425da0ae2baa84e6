"""Defines SmolLM3's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..config import HeadCount, HiddenSize, LayerCount, PositionCount, Range, TokenId, VocabSize
from ..llama.config import DecoderConfig

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass
class SmolLM3Config(DecoderConfig):
    """The sizes and constants of a SmolLM3.

    Names, meanings and defaults are those of transformers.

    Attributes:
        no_rope_layers: For each layer 1 if it rotates queries and keys, else 0; by default each
            `no_rope_layer_interval`-th layer does not.
        layer_types: Of each layer; by default the layers that do not rotate are
            "sliding_attention" if `use_sliding_window`.
    """

    model_type: ClassVar[str] = "smollm3"
    default_theta: ClassVar[float] = 2000000.0

    vocab_size: VocabSize = 128256
    hidden_size: HiddenSize = 2048
    num_hidden_layers: LayerCount = 36
    num_attention_heads: HeadCount = 16  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = 4
    max_position_embeddings: PositionCount = 32768
    use_sliding_window: bool = False
    sliding_window: PositionCount | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Range(1, 512)] = 4
    layer_types: list[LayerType] | None = None
    tie_word_embeddings: bool = True
    pad_token_id: TokenId | None = 128004
    bos_token_id: TokenId | None = 128000
    eos_token_id: TokenId | list[TokenId] | None = 128001
    architecture: str = "SmolLM3ForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers names {len(self.no_rope_layers)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if "sliding_attention" in self.layer_types and self.window is None:
            raise ValueError(
                "layers of type sliding_attention need use_sliding_window=true and a sliding_window"
            )

    @property
    def rotates(self) -> tuple[bool, ...]:
        layers = range(self.num_hidden_layers)
        if self.no_rope_layers is not None:
            return tuple(bool(self.no_rope_layers[layer]) for layer in layers)
        return tuple((layer + 1) % self.no_rope_layer_interval != 0 for layer in layers)

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is not None:
            return tuple(
                self.window if kind == "sliding_attention" else None for kind in self.layer_types
            )
        return tuple(None if rotates else self.window for rotates in self.rotates)
