"""Mixtral (Jiang et al., 2024, "Mixtral of Experts", arXiv:2401.04088) and the mixtures like it.

- Llama's blocks, each with a mixture of experts in place of the MLP
- a linear router chooses k of E experts for each token; their weights are softmax probabilities
- each expert is a SwiGLU
- an auxiliary loss balances the experts' numbers of tokens, if `output_router_logits`

The configuration declares what differs between the families:

- Mixtral: the weights of a token's experts are divided by their sum
- Qwen2-MoE: a shared expert, which computes every token; biases of queries, keys and values
- Qwen3-MoE: norms of queries and keys; some layers may have a single MLP
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...mpu import ParallelMesh, gather_from_context, share_gradient
from ..blocks.moe import MixtureMLP, asks_for_router, flatten_logits, router_record
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, QuestionAnswering, SequenceClassification, TokenClassification
from ..language_model import IGNORED, CausalLM
from ..llama.model import LlamaBackbone, LlamaBlock
from ..outputs import MoeCausalLMOutput, MoeModelOutput, StageOutput
from ..parallel_config import ParallelConfig
from ..router_losses import RouterLossStage, RouterTally
from .config import MixtureConfig


class MixtralBlock(LlamaBlock):
    """A block of Mixtral or of a sibling."""

    def build_mlp(
        self, config: Any, layer: int, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> nn.Module:
        assert isinstance(config, MixtureConfig)
        if not config.has_experts(layer):
            return super().build_mlp(config, layer, mesh, parallel_config)
        return MixtureMLP(
            config.hidden_size,
            config.expert_size,
            config.hidden_act,
            experts=config.expert_count,
            top_k=config.num_experts_per_tok,
            normalize=config.normalizes_weights,
            shared_size=config.shared_size,
            mesh=mesh,
            parallel_config=parallel_config,
        )


class MixtralBackbone(LlamaBackbone):
    """Mixtral, or a sibling, without a head. With `mesh=None` the model is not split."""

    config: Any  # a MixtureConfig
    block_class = MixtralBlock


class MixtureCausalLM(RouterLossStage, CausalLM):
    """Predicts each token from the tokens before it, with the auxiliary loss of a mixture."""

    config: Any  # a MixtureConfig

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        output_router_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Returns the outputs of `CausalLM`, and those of the routers if they are asked for.

        Then the loss has the auxiliary loss times `router_aux_loss_coef` added to it, of all
        samples together as in transformers. If this call is a part of a batch of
        `num_items_in_batch` targets, the auxiliary loss is each sample's own, weighted by its share
        of the targets: the losses of the parts add up to a mean over the batch, which does not
        depend on how the batch is divided over calls and ranks. In a pipeline the last stage adds
        the loss of all layers, and returns the scores of its own.

        Args:
            output_router_logits: By default what the configuration says.
        """
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "labels": labels,
            "num_items_in_batch": num_items_in_batch,
            "shift_labels": shift_labels,
            **options,
        }
        if not asks_for_router(self, output_router_logits):
            return super().compute_outputs(input_ids, **inputs)
        top_k = self.config.num_experts_per_tok
        tally = RouterTally([(self, attention_mask)], self.config.expert_count, top_k, self.mesh)
        with router_record.recording(tally) as tally.record:
            output: Any = super().compute_outputs(input_ids, **inputs)
        if isinstance(output, StageOutput) or tally.is_empty:
            return output
        [sums] = tally.split(input_ids)
        loss: Any = output.loss
        targets = shift_labels
        if labels is not None:
            targets = self.targets(labels)
        if targets is not None and num_items_in_batch is not None:
            shares = (targets != IGNORED).sum(-1) / num_items_in_batch  # [B]
            by_sample = sums.balance_loss_by_sample()
            auxiliary = self.config.router_aux_loss_coef * (shares * by_sample).sum()
            loss = loss + share_gradient(auxiliary, self.mesh)
            balance = by_sample.mean()
        else:
            balance = sums.balance_loss()
            if loss is not None:
                auxiliary = self.config.router_aux_loss_coef * balance
                loss = loss + share_gradient(auxiliary, self.mesh)
        logits = [gather_from_context(scores, self.mesh) for scores in tally.record.values()]
        return MoeCausalLMOutput.from_output(
            output, loss=loss, aux_loss=balance, router_logits=flatten_logits(logits)
        )


class MixtureModel(BareModel):
    """The embeddings and blocks of a mixture without a head."""

    def compute_outputs(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_router_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Returns the last hidden states, and the routers' scores if they are asked for."""
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "output_hidden_states": output_hidden_states,
            **options,
        }
        if not asks_for_router(self, output_router_logits):
            return super().compute_outputs(input_ids, **inputs)
        with router_record.recording() as record:
            output = super().compute_outputs(input_ids, **inputs)
        if isinstance(output, StageOutput):
            return output
        logits = [gather_from_context(scores, self.mesh) for scores in record.values()]
        return MoeModelOutput.from_output(output, router_logits=flatten_logits(logits))


class MixtralForCausalLM(MixtureCausalLM, MixtralBackbone, GenerationMixin):
    """Mixtral that predicts the next token."""


class MixtralModel(MixtureModel, MixtralBackbone):
    """Mixtral without a head."""


class MixtralForSequenceClassification(SequenceClassification, MixtralBackbone):
    """Mixtral that classifies a text."""

    pooling = "last"
    dropout_rate = None
    bias = False
    linear_name = "classifier"


class MixtralForTokenClassification(TokenClassification, MixtralBackbone):
    """Mixtral that classifies each token."""

    linear_name = "classifier"


class MixtralForQuestionAnswering(QuestionAnswering, MixtralBackbone):
    """Mixtral that finds the first and the last token of an answer."""
