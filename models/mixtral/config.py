"""Defines Mixtral's configuration, with the keys of Hugging Face's `config.json`, and what the
mixtures like it share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config import HeadCount, InnerSize, PositionCount, Range, TokenId, VocabSize
from ..llama.config import DecoderConfig

ExpertCount = Annotated[int, Range(1, 2**16)]
LossWeight = Annotated[float, Range(0, 1000)]


@dataclass
class MixtureConfig(DecoderConfig):
    """The sizes and constants of a decoder with mixtures of experts. Names, meanings and defaults
    are those of transformers.

    A family declares the number of experts and their width by the properties.

    Attributes:
        num_experts_per_tok: The number of experts that compute a token.
        output_router_logits: Whether the auxiliary loss is added to the loss of a call that does
            not say so itself.
        router_aux_loss_coef: The factor of the auxiliary loss.
    """

    num_experts_per_tok: ExpertCount = 2
    output_router_logits: bool = False
    router_aux_loss_coef: LossWeight = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.expert_count:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most the number of "
                f"experts, {self.expert_count}"
            )

    @property
    def expert_size(self) -> int:
        """The inner width of an expert."""
        return self.intermediate_size

    @property
    def shared_size(self) -> int:
        """The inner width of the expert that computes every token; 0 for none."""
        return 0

    @property
    def normalizes_weights(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return True

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has a mixture instead of a single MLP."""
        return True


@dataclass
class MixtralConfig(MixtureConfig):
    """A configuration of Mixtral."""

    model_type: ClassVar[str] = "mixtral"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    default_theta: ClassVar[float] = 1000000.0

    vocab_size: VocabSize = 32000
    intermediate_size: InnerSize = 14336
    num_key_value_heads: HeadCount | None = 8
    max_position_embeddings: PositionCount = 131072
    rms_norm_eps: Annotated[float, Range(0, 1, above=True)] = 1e-5
    sliding_window: PositionCount | None = None
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    num_local_experts: ExpertCount = 8
    router_jitter_noise: Annotated[float, Range(0, 1)] = 0.0
    architecture: str = "MixtralForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router_jitter_noise:
            raise ValueError(
                f"router_jitter_noise={self.router_jitter_noise} is not supported: its noise would "
                "depend on the layout; use 0"
            )

    @property
    def expert_count(self) -> int:
        return self.num_local_experts

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers
