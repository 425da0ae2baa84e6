"""Defines gpt-oss's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..blocks.rotary import RopeParameters
from ..config import (
    HeadCount,
    HiddenSize,
    InnerSize,
    LayerCount,
    NormEpsilon,
    PositionCount,
    Range,
    VocabSize,
)
from ..mixtral.config import ExpertCount, MixtureConfig
from ..qwen2.config import LayerType

# The rotation of a model whose `config.json` says nothing about it.
_YARN: RopeParameters = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass
class GptOssConfig(MixtureConfig):
    """The sizes and constants of a gpt-oss. Names, meanings and defaults are those of transformers.

    Attributes:
        intermediate_size: The inner width of an expert.
        sliding_window: The window of the layers of type "sliding_attention".
        layer_types: Of each layer; by default every other one, from the first on, is
            "sliding_attention".
        swiglu_alpha, swiglu_limit: See `ops.clamped_swiglu`.
    """

    model_type: ClassVar[str] = "gpt_oss"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    default_theta: ClassVar[float] = 150000.0
    attention_sinks: ClassVar[bool] = True

    vocab_size: VocabSize = 201088
    hidden_size: HiddenSize = 2880
    intermediate_size: InnerSize = 2880
    num_hidden_layers: LayerCount = 36
    num_attention_heads: HeadCount = 64  # type: ignore[assignment]
    num_key_value_heads: HeadCount | None = 8
    head_dim: HiddenSize | None = 64
    max_position_embeddings: PositionCount = 131072
    rms_norm_eps: NormEpsilon = 1e-5
    attention_bias: bool = True
    sliding_window: PositionCount | None = 128
    layer_types: list[LayerType] | None = None
    num_experts_per_tok: ExpertCount = 4
    num_local_experts: ExpertCount = 128
    swiglu_alpha: Annotated[float, Range(0, 100)] = 1.702
    swiglu_limit: Annotated[float, Range(0, 1e6, above=True)] = 7.0
    architecture: str = "GptOssForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.layer_types
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(kinds)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if kinds is not None and "sliding_attention" in kinds and not self.sliding_window:
            raise ValueError("layers of type sliding_attention need a sliding_window")

    @property
    def expert_count(self) -> int:
        return self.num_local_experts

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is None:
            window = self.sliding_window
            return tuple(None if i % 2 else window for i in range(self.num_hidden_layers))
        return tuple(
            self.sliding_window if kind == "sliding_attention" else None
            for kind in self.layer_types
        )

    @classmethod
    def read_rope(cls, values: dict[str, Any], positions: int) -> RopeParameters:
        """Returns the rotary parameters of the contents of a `config.json`; YaRN if it has none."""
        if not values.get("rope_scaling") and not values.get("rope_parameters"):
            values = {**values, "rope_parameters": _YARN}
        return super().read_rope(values, positions)
