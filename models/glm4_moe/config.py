"""Defines GLM-4.5's configuration, with the keys of Hugging Face's `config.json`, and what the
mixtures with corrected routers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..config import HeadCount, InnerSize, LayerCount, NormEpsilon, PositionCount, Range, VocabSize
from ..llama.config import DecoderConfig
from ..mixtral.config import ExpertCount

LayerNumber = Annotated[int, Range(0, 2**16)]


@dataclass
class CorrectedMixtureConfig(DecoderConfig):
    """The sizes and constants of a decoder whose mixtures have a router with corrected scores, and
    a shared expert. Names and meanings are those of transformers.

    Attributes:
        intermediate_size: The inner width of the layers without experts.
        moe_intermediate_size: The inner width of an expert.
        n_routed_experts: The number of experts that the router chooses from.
        n_shared_experts: The width of the shared expert, in widths of an expert.
        num_experts_per_tok: The number of experts that compute a token.
        n_group, topk_group: The number of groups of experts, and of those that a token's experts
            are chosen from.
        norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
        routed_scaling_factor: What the weights are multiplied by.
        first_k_dense_replace: The number of layers without experts, which are the first ones.
        num_nextn_predict_layers: The number of layers behind the others that a file may have, which
            predict further tokens. As in transformers, they are not part of the model.
        output_router_logits: Whether a call that does not say so itself returns the routers' scores.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    weak_names: ClassVar[frozenset[str]] = frozenset({"num_mtp_layers"})

    moe_intermediate_size: InnerSize = 1408
    n_routed_experts: ExpertCount = 128
    n_shared_experts: ExpertCount = 1
    num_experts_per_tok: ExpertCount = 8
    n_group: ExpertCount = 1
    topk_group: ExpertCount = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    first_k_dense_replace: LayerNumber = 1
    num_nextn_predict_layers: LayerNumber = 1
    output_router_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_routed_experts % self.n_group or self.n_routed_experts < 2 * self.n_group:
            raise ValueError(
                f"n_group={self.n_group} must divide n_routed_experts={self.n_routed_experts} into "
                "groups of at least 2 experts"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group={self.topk_group} must be at most n_group={self.n_group}")
        most = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > most:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most {most}, the number "
                f"of experts in topk_group={self.topk_group} groups"
            )

    @property
    def expert_count(self) -> int:
        return self.n_routed_experts

    @property
    def expert_size(self) -> int:
        """The inner width of an expert."""
        return self.moe_intermediate_size

    @property
    def shared_size(self) -> int:
        """The inner width of the expert that computes every token."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def extra_layers(self) -> range:
        """The numbers of the layers in files that are not part of the model."""
        first = self.num_hidden_layers
        return range(first, first + self.num_nextn_predict_layers)

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has a mixture instead of a single MLP."""
        return layer >= self.first_k_dense_replace


@dataclass
class Glm4MoeConfig(CorrectedMixtureConfig):
    """A configuration of GLM-4.5, GLM-4.6 or GLM-4.7. Defaults are those of transformers.

    Attributes:
        use_qk_norm: Whether each head's queries and keys pass through an RMSNorm.
    """

    model_type: ClassVar[str] = "glm4_moe"
    default_rotated: ClassVar[float] = 0.5
    rotates_any_part: ClassVar[bool] = True

    vocab_size: VocabSize = 151552
    intermediate_size: InnerSize = 10944
    num_hidden_layers: LayerCount = 46
    num_attention_heads: HeadCount = 96  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = 8
    max_position_embeddings: PositionCount = 131072
    rms_norm_eps: NormEpsilon = 1e-5
    use_qk_norm: bool = False
    architecture: str = "Glm4MoeForCausalLM"

    @property
    def qk_norm(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.use_qk_norm

    @property
    def output_bias(self) -> bool:
        return False

    def check_heads(self, hidden_size: int, heads: int) -> None:
        """Allows any number of heads: as in transformers, a `head_dim` that is not set is rounded
        down, and all heads together need not be as wide as the hidden state.
        """
