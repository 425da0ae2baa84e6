"""DeepSeek-V3 (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437).

- pre-RMSNorm blocks like Llama's; the first ones have a SwiGLU, and the others GLM-4.5's mixture:
  sigmoid scores, which a correction balances, groups of experts, a shared expert
- multi-head latent attention: keys and values are made from one latent vector a position, which a
  cache keeps; a part of each head rotates, and heads share those features of the keys
- queries are made from a latent vector too, in the larger models
- YaRN, whose `mscale` also multiplies the scores
- the layers that predict further tokens are not part of the model, as in transformers
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...mpu import ParallelMesh
from ..blocks.latent_attention import LatentAttention
from ..generation.mixin import GenerationMixin
from ..glm4_moe.model import CorrectedMixtureBackbone, CorrectedMixtureCausalLM, Glm4MoeBlock
from ..heads import SequenceClassification, TokenClassification
from ..mixtral.model import MixtureModel
from ..parallel_config import ParallelConfig


class DeepseekV3Block(Glm4MoeBlock):
    """A block of DeepSeek-V3."""

    def build_attention(
        self, config: Any, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> nn.Module:
        return LatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            query_rank=config.q_lora_rank,
            latent_rank=config.kv_lora_rank,
            nope_size=config.qk_nope_head_dim,
            rope_size=config.qk_rope_head_dim,
            value_size=config.v_head_dim,
            bias=config.attention_bias,
            scale=config.attention_scale,
            dropout=config.attention_dropout,
            mesh=mesh,
            parallel_config=parallel_config,
        )


class DeepseekV3Backbone(CorrectedMixtureBackbone):
    """DeepSeek-V3 without a head. With `mesh=None` the model is not split."""

    block_class = DeepseekV3Block


class DeepseekV3ForCausalLM(CorrectedMixtureCausalLM, DeepseekV3Backbone, GenerationMixin):
    """DeepSeek-V3 that predicts the next token."""


class DeepseekV3Model(MixtureModel, DeepseekV3Backbone):
    """DeepSeek-V3 without a head."""


class DeepseekV3ForSequenceClassification(SequenceClassification, DeepseekV3Backbone):
    """DeepSeek-V3 that classifies a text."""

    pooling = "last"
    dropout_rate = None
    bias = False
    linear_name = "classifier"


class DeepseekV3ForTokenClassification(TokenClassification, DeepseekV3Backbone):
    """DeepSeek-V3 that classifies each token."""

    linear_name = "classifier"
