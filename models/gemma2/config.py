"""Defines Gemma 2's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..config import Activation, HeadCount, HiddenSize, InnerSize, LayerCount, PositionCount, Range
from ..gemma.config import GemmaConfig

LayerType = Literal["full_attention", "sliding_attention"]
Cap = Annotated[float, Range(0, 1e6, above=True)]


@dataclass
class Gemma2Config(GemmaConfig):
    """The sizes and constants of a Gemma 2.

    Names, meanings and defaults are those of transformers.

    Attributes:
        hidden_activation: The MLP's activation. A `hidden_act` is not read.
        query_pre_attn_scalar: The scores are divided by its square root.
        layer_types: Of each layer; by default the first and each second one has a window.
        final_logit_softcapping: The logits are cap * tanh(logits / cap).
        attn_logit_softcapping: The same for the scores.
    """

    model_type: ClassVar[str] = "gemma2"
    sandwich_norms: ClassVar[bool] = True

    hidden_size: HiddenSize = 2304
    intermediate_size: InnerSize = 9216
    num_hidden_layers: LayerCount = 26
    num_attention_heads: HeadCount = 8  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = 4
    hidden_activation: Activation = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Annotated[float, Range(0, 1e9, above=True)] = 256
    sliding_window: PositionCount = 4096
    layer_types: list[LayerType] | None = None
    final_logit_softcapping: Cap | None = 30.0
    attn_logit_softcapping: Cap | None = 50.0
    architecture: str = "Gemma2ForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden_act", self.hidden_activation)
        if len(self.attention_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types lists {len(self.attention_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}; change both, or set layer_types to null"
            )

    @property
    def attention_types(self) -> list[LayerType]:
        """Whether each layer attends to the whole sequence."""
        if self.layer_types is not None:
            return self.layer_types
        layers = range(self.num_hidden_layers)
        return ["full_attention" if i % 2 else "sliding_attention" for i in layers]

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def score_cap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(
            self.sliding_window if kind == "sliding_attention" else None
            for kind in self.attention_types
        )
