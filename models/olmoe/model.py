"""OLMoE (Muennighoff et al., 2024, "OLMoE: Open Mixture-of-Experts Language Models",
arXiv:2409.02060): Mixtral's blocks with norms of the queries, and of the keys, of all heads together.
"""

from __future__ import annotations

from ..generation.mixin import GenerationMixin
from ..mixtral.model import MixtralForCausalLM, MixtralModel


class OlmoeForCausalLM(MixtralForCausalLM, GenerationMixin):
    """OLMoE that predicts the next token."""


class OlmoeModel(MixtralModel):
    """OLMoE without a head."""
