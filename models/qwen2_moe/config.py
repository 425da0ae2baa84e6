"""Defines Qwen2-MoE's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config import HeadCount, InnerSize, Range
from ..mixtral.config import ExpertCount
from ..qwen2.config import LayerType
from ..qwen3_moe.config import QwenMixtureConfig


@dataclass
class Qwen2MoeConfig(QwenMixtureConfig):
    """A configuration of Qwen2-MoE or Qwen1.5-MoE.

    Attributes:
        shared_expert_intermediate_size: The inner width of the shared expert.
        layer_types: Of each layer; by default, with `use_sliding_window`, every second layer before
            `max_window_layers` is "sliding_attention", beginning with the first.
    """

    model_type: ClassVar[str] = "qwen2_moe"

    intermediate_size: InnerSize = 5632
    num_attention_heads: HeadCount = 16  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = 16
    max_window_layers: Annotated[int, Range(0, 512)] = 28
    moe_intermediate_size: InnerSize = 1408
    shared_expert_intermediate_size: InnerSize = 5632
    num_experts_per_tok: ExpertCount = 4
    num_experts: ExpertCount = 60
    qkv_bias: bool = True  # type: ignore[assignment] - a property of the base
    layer_types: list[LayerType] | None = None
    architecture: str = "Qwen2MoeForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if "sliding_attention" in (self.layer_types or ()) and not self.window:
            raise ValueError(
                "layers of type sliding_attention need use_sliding_window=true and a sliding_window"
            )

    @property
    def expert_count(self) -> int:
        return self.num_experts

    @property
    def shared_size(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def output_bias(self) -> bool:
        return False

    @property
    def windows(self) -> tuple[int | None, ...]:
        windows: list[int | None] = []
        for layer in range(self.num_hidden_layers):
            if self.layer_types is not None:
                has_window = self.layer_types[layer] == "sliding_attention"
            else:
                is_even = layer % 2 == 0
                has_window = is_even and layer < self.max_window_layers
            windows.append(self.window if has_window else None)
        return tuple(windows)
