"""Defines Qwen3-MoE's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..config import HeadCount, InnerSize, PositionCount, Range, VocabSize
from ..mixtral.config import ExpertCount, MixtureConfig


@dataclass
class QwenMixtureConfig(MixtureConfig):
    """The sizes and constants that Qwen2-MoE and Qwen3-MoE share.

    Names, meanings and defaults are those of transformers.

    Attributes:
        intermediate_size: The inner width of the layers without experts.
        moe_intermediate_size: The inner width of an expert.
        norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
        decoder_sparse_step: Every so many layers, the last one has experts.
        mlp_only_layers: Numbers of layers that have none.
    """

    vocab_size: VocabSize = 151936
    hidden_size: Annotated[int, Range(1, 2**20)] = 2048
    intermediate_size: InnerSize = 6144
    num_hidden_layers: Annotated[int, Range(1, 512)] = 24
    max_position_embeddings: PositionCount = 32768
    use_sliding_window: bool = False
    sliding_window: Annotated[int, Range(0, 2**31 - 1)] | None = 4096
    decoder_sparse_step: Annotated[int, Range(1, 512)] = 1
    moe_intermediate_size: InnerSize = 768
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    @property
    def normalizes_weights(self) -> bool:
        return self.norm_topk_prob

    @property
    def window(self) -> int | None:
        """The sliding window of the layers that have one; as in files, 0 is none."""
        return (self.sliding_window or None) if self.use_sliding_window else None

    def has_experts(self, layer: int) -> bool:
        is_dense = layer in (self.mlp_only_layers or ())
        return not is_dense and (layer + 1) % self.decoder_sparse_step == 0


@dataclass
class Qwen3MoeConfig(QwenMixtureConfig):
    """A configuration of Qwen3-MoE."""

    model_type: ClassVar[str] = "qwen3_moe"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    qk_norm: ClassVar[bool] = True

    num_key_value_heads: HeadCount | None = 4
    num_experts_per_tok: ExpertCount = 8
    num_local_experts: ExpertCount = 128
    architecture: str = "Qwen3MoeForCausalLM"

    @property
    def expert_count(self) -> int:
        return self.num_local_experts

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.window,) * self.num_hidden_layers

    @classmethod
    def replace_common_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the contents of a `config.json` with the names of transformers 5; if the file has
        both names of the number of experts, that of transformers 5 counts.
        """
        if "num_local_experts" in values:
            values = {name: value for name, value in values.items() if name != "num_experts"}
        return super().replace_common_names(values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a `config.json` that both transformers 4 and 5 read."""
        return {**super().to_dict(), "num_experts": self.num_local_experts}
