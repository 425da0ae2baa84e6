"""GLM-4.5 (Zeng et al., 2025, "GLM-4.5: Agentic, Reasoning, and Coding Foundation Models",
arXiv:2508.06471) and what the mixtures with corrected routers share.

- Llama's blocks, in which half of each head rotates; the first ones have a single MLP, and the
  others a mixture
- a linear router in fp32 scores each expert by a sigmoid; a correction is added when k of E experts
  are chosen, and balances them without a loss
- a shared expert computes every token
- the larger models have norms of each head's queries and keys
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelMesh, cut_sequence, gather_from_context
from ..blocks.cache import Cache
from ..blocks.corrected_moe import CorrectedMixtureMLP, choice_counting
from ..blocks.moe import asks_for_router, flatten_logits, router_record
from ..generation.mixin import GenerationMixin
from ..language_model import CausalLM
from ..llama.model import LlamaBackbone, LlamaBlock
from ..mixtral.model import MixtureModel
from ..outputs import BackboneOutput, MoeCausalLMOutput, StageOutput
from ..parallel_config import ParallelConfig
from .config import CorrectedMixtureConfig


def build_corrected_mixture(
    config: CorrectedMixtureConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
) -> CorrectedMixtureMLP:
    """Returns the mixture of a layer."""
    return CorrectedMixtureMLP(
        config.hidden_size,
        config.expert_size,
        config.hidden_act,
        experts=config.expert_count,
        top_k=config.num_experts_per_tok,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        shared_size=config.shared_size,
        mesh=mesh,
        parallel_config=parallel_config,
    )


class Glm4MoeBlock(LlamaBlock):
    """A block of GLM-4.5."""

    def build_mlp(
        self, config: Any, layer: int, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> nn.Module:
        assert isinstance(config, CorrectedMixtureConfig)
        if not config.has_experts(layer):
            return super().build_mlp(config, layer, mesh, parallel_config)
        return build_corrected_mixture(config, mesh, parallel_config)


class CorrectedMixtureBackbone(LlamaBackbone):
    """A decoder whose mixtures have corrected routers, without a head."""

    config: Any  # a CorrectedMixtureConfig

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks, and counts the experts' tokens if a step is trained."""
        inputs = (input_ids, attention_mask, position_ids, cache, seq_idx)
        if not self.training or not torch.is_grad_enabled():
            return super().run_backbone(*inputs)
        is_token = None
        if attention_mask is not None and attention_mask.shape == input_ids.shape[:2]:
            is_token = cut_sequence(attention_mask, self.mesh)
        with choice_counting.over(is_token):
            return super().run_backbone(*inputs)

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(".correction.value"):
            full.zero_()
        else:
            super().initialize_parameter(name, full, generator)


class Glm4MoeBackbone(CorrectedMixtureBackbone):
    """GLM-4.5 without a head. With `mesh=None` the model is not split."""

    block_class = Glm4MoeBlock


class CorrectedMixtureCausalLM(CausalLM):
    """Predicts each token from the tokens before it. There is no auxiliary loss."""

    config: Any  # a CorrectedMixtureConfig

    def compute_outputs(
        self, input_ids: Tensor, *, output_router_logits: bool | None = None, **options: Any
    ) -> Any:
        """Returns the outputs of `CausalLM`, and the routers' scores if they are asked for.

        Args:
            output_router_logits: By default what the configuration says.
        """
        if not asks_for_router(self, output_router_logits):
            return super().compute_outputs(input_ids, **options)
        with router_record.recording() as record:
            output: Any = super().compute_outputs(input_ids, **options)
        logits = [gather_from_context(scores, self.mesh) for scores in record.values()]
        if isinstance(output, StageOutput) or not logits:
            return output
        return MoeCausalLMOutput.from_output(output, router_logits=flatten_logits(logits))


class Glm4MoeForCausalLM(CorrectedMixtureCausalLM, Glm4MoeBackbone, GenerationMixin):
    """GLM-4.5 that predicts the next token."""


class Glm4MoeModel(MixtureModel, Glm4MoeBackbone):
    """GLM-4.5 without a head."""
