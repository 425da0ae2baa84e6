"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners").

- learned positions, added to the word embeddings
- pre-LayerNorm blocks: x + attention(norm(x)), then x + mlp(norm(x)); a final norm
- fused qkv with biases, causal attention, the tanh approximation of GELU
- the output head is the word embedding; its rows are split over the ranks, so the logits are
  vocabulary-parallel
- initial weights N(0, 0.02), divided by √(2 · layers) if they write into the residual stream;
  biases zero
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import Dropout, LayerNorm, ParallelMesh, VocabParallelEmbedding, dropout_state
from ..backbone import Backbone
from ..blocks.attention import CrossAttention, SelfAttention
from ..blocks.cache import Cache, LayerKVCache
from ..blocks.embeddings import PositionEmbedding, check_positions, embed_tokens
from ..blocks.masks import causal_mask, find_pieces, key_mask, restart_positions
from ..blocks.mlp import MLP
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.stack import Block, BlockList
from ..calls import keep_positions
from ..generation.mixin import GenerationMixin
from ..heads import (
    BareModel,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    class_loss,
)
from ..language_model import VOCABULARY_MULTIPLE, CausalLM
from ..outputs import BackboneOutput, LazyLogits, ModelOutput, StageOutput, absent
from ..parallel_config import ParallelConfig, layer_arguments
from .config import GPT2Config


class GPT2Block(Block):
    def __init__(
        self,
        config: GPT2Config,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        size = config.n_embd
        eps = config.layer_norm_epsilon
        scale = (size // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        shared = layer_arguments(mesh, parallel_config)
        self.ln_1 = LayerNorm(size, eps, **shared)
        self.attention = SelfAttention(
            size,
            config.n_head,
            scale=scale,
            dropout=config.attn_pdrop,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        if config.add_cross_attention:
            self.ln_cross = LayerNorm(size, eps, **shared)
            self.cross_attention = CrossAttention(
                size,
                config.n_head,
                scale=scale,
                dropout=config.attn_pdrop,
                mesh=mesh,
                parallel_config=parallel_config,
            )
            self.cross_attention_dropout = residual_dropout(
                config.resid_pdrop, mesh, parallel_config
            )
        self.ln_2 = LayerNorm(size, eps, **shared)
        self.mlp = MLP(
            size,
            config.inner_size,
            config.activation_function,
            mesh=mesh,
            parallel_config=parallel_config,
        )

        self.attention_dropout = residual_dropout(config.resid_pdrop, mesh, parallel_config)
        self.mlp_dropout = residual_dropout(config.resid_pdrop, mesh, parallel_config)

    def compute(
        self,
        x: Tensor,
        mask: Tensor | None,
        cache: LayerKVCache | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        source_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            source: An encoder's output [B, T, H]. For the other arguments see `SelfAttention` and
                `CrossAttention`.
        """
        y, x = self.ln_1(x, return_residual=True)
        y = self.attention(y, mask, causal=True, cache=cache)
        dropout = self.attention_dropout
        if source is not None:
            y, x = add_and_norm(self.ln_cross, dropout, y, x)
            y = self.cross_attention(y, source, source_mask, source_cache)
            dropout = self.cross_attention_dropout
        y, x = add_and_norm(self.ln_2, dropout, y, x)
        return self.mlp_dropout(self.mlp(y), x)


class GPT2Backbone(Backbone):
    """GPT-2 without a head. With `mesh=None` the model is not split."""

    positional_inputs = (
        "input_ids",
        "past_key_values",
        "attention_mask",
        "token_type_ids",
        "position_ids",
        "inputs_embeds",
    )
    config: GPT2Config

    def __init__(
        self,
        config: GPT2Config,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        parallel_config = parallel_config or ParallelConfig()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, config.n_embd, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )
        self.position_embeddings = PositionEmbedding(config.n_positions, config.n_embd, **shared)
        self.embedding_dropout = residual_dropout(config.embd_pdrop, mesh, parallel_config)
        self.blocks = BlockList(
            (GPT2Block(config, layer, mesh, parallel_config) for layer in range(config.n_layer)),
            parallel_config,
        )
        self.final_norm = LayerNorm(config.n_embd, config.layer_norm_epsilon, **shared)

    @property
    def attends_to_encoder(self) -> bool:
        return self.config.add_cross_attention

    def run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache: Cache | None = None,
        seq_idx: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks.

        Args:
            input_ids: int64 [B, S], or embeddings [B, S, H].
            attention_mask: [B, S], or [B, M + S] with a cache; 0 for padding.
            position_ids: int64 [B, S] or [1, S]. Without a mask and a cache, rows whose positions
                restart are packed, and each of their pieces attends to itself alone.
            token_type_ids: int64 [B, S], tokens whose embeddings are added.
            cache: The keys and values of M earlier positions; not supported under sequence
                parallelism.
            seq_idx: int64 [B, S] or [1, S], the number of each token's piece in packed rows.
            encoder_hidden_states: [B, T, H], whole on each rank, which the blocks attend to.
            encoder_attention_mask: [B, T], 0 for padding.

        Raises:
            ValueError: The configuration has no `add_cross_attention`.
        """
        if encoder_hidden_states is not None and not self.config.add_cross_attention:
            raise ValueError(
                f"{type(self).__name__} takes encoder_hidden_states only with add_cross_attention"
            )
        cached = 0 if cache is None else cache.length
        pieces = find_pieces(seq_idx, position_ids, attention_mask, cache is not None)
        if position_ids is None and pieces is not None:
            position_ids = restart_positions(pieces)
        longest = cached + input_ids.shape[1] if pieces is None else 0  # of a piece unknown
        check_positions(position_ids, longest, self.config.n_positions)
        mask = causal_mask(attention_mask, input_ids.shape[1], pieces)
        source = None
        if encoder_hidden_states is not None:
            source = self.scatter_hidden_states(encoder_hidden_states)
        source_mask = key_mask(encoder_attention_mask)

        def block_arguments(layer: int) -> tuple[Any, ...]:
            if cache is None:
                return (mask, None, source, source_mask)
            source_cache = cache.sources[layer] if cache.sources else None
            return (mask, cache.layers[layer], source, source_mask, source_cache)

        return self.run_stack(
            self.blocks,
            embed=lambda: self.embed(input_ids, position_ids, token_type_ids, cached),
            block_arguments=block_arguments,
            final_norm=self.final_norm,
        )

    def embed(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        cached: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the
        table for a head.
        """
        x, table = embed_tokens(self.word_embeddings, input_ids)
        if position_ids is None:
            x = x + self.position_embeddings(range(cached, cached + input_ids.shape[1]))
        else:
            x = x + self.position_embeddings(position_ids)
        if token_type_ids is not None:
            types, table = self.word_embeddings.embed(token_type_ids, table)
            x = x + types
        return self.embedding_dropout(x), table

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(".bias"):
            full.zero_()
        elif "ln_" in name or "norm" in name:
            full.fill_(1.0)
        else:
            std = self.config.initializer_range
            writes_residual = name.endswith((".output.weight", ".down.weight"))
            if writes_residual:
                std /= math.sqrt(2 * self.config.n_layer)
            full.normal_(0.0, std, generator=generator)


class GPT2LMHeadModel(CausalLM, GPT2Backbone, GenerationMixin):
    """GPT-2 that predicts the next token."""

    positional_inputs = (
        *GPT2Backbone.positional_inputs,
        "encoder_hidden_states",
        "encoder_attention_mask",
    )


class GPT2DoubleHeadsModel(CausalLM, GPT2Backbone, GenerationMixin):
    """GPT-2 that predicts the next token, and chooses one of several texts."""

    positional_inputs = (*GPT2Backbone.positional_inputs, "mc_token_ids")
    label_names = ("labels", "mc_labels")

    def add_head(self) -> None:
        super().add_head()
        self.choice_dropout = Dropout(self.config.summary_first_dropout)
        self.choice_head = nn.Linear(self.hidden_size, 1)

    @classmethod
    def example_ids(cls, config: Any, ids: Tensor) -> Tensor:
        return torch.stack([ids, ids.flip(1)], 1)  # [B, 2, S]

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        mc_token_ids: Tensor | None = None,
        mc_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: Tensor | int = 0,
        **options: Any,
    ) -> DoubleHeadsOutput | StageOutput:
        """Returns both kinds of logits and, with labels, both losses.

        Args:
            input_ids: int64 [B, C, S], or embeddings [B, C, S, H], the texts of C choices; the other
                inputs of `GPT2Backbone.run_backbone` have the shape of the ids. A batch [B, S] is
                one of B choices.
            labels: int64 [B, C, S], which are shifted here; -100 is ignored.
            mc_token_ids: int64 [B, C], the place of the token whose state represents a text; the
                last one by default.
            mc_labels: int64 [B], the number of the right choice.
            logits_to_keep: The positions whose logits are returned; see `keep_positions`.
        """
        shape = input_ids.shape[:-1]  # [B, C], or [B]
        if input_ids.is_floating_point():
            shape = shape[:-1]
        choices = shape[1] if len(shape) == 2 else 1
        rows: dict[str, Any] = {"attention_mask": attention_mask, **options}
        if len(shape) == 2:
            input_ids = input_ids.flatten(0, 1)
            for name, value in rows.items():
                if isinstance(value, Tensor) and value.dim() == 3:
                    rows[name] = value.flatten(0, 1)  # [B · C, S]
        with dropout_state.rows_per_sample(choices):
            hidden = self.run_backbone(input_ids, **rows)
            if isinstance(hidden, StageOutput):
                return hidden
            x = self.gather_hidden_states(hidden.states[-1])  # [B · C, S, H]
            places = torch.full(x.shape[:1], x.shape[1] - 1, device=x.device)
            if mc_token_ids is not None:
                places = mc_token_ids.reshape(-1)
            chosen = x[torch.arange(len(x), device=x.device), places]  # [B · C, H]
            scores = self.choice_head(self.choice_dropout(chosen)).view(shape)
        choice_loss = None
        if mc_labels is not None:
            choice_loss = class_loss(scores.view(-1, scores.shape[-1]), mc_labels)
        targets = None
        if labels is not None:
            targets = self.targets(labels).view(-1, labels.shape[-1])
        loss, logits = self.loss_and_logits(
            self.head,
            keep_positions(hidden.states[-1], logits_to_keep),
            targets,
            num_items_in_batch,
            hidden.table,
        )
        states = self.collect_hidden_states(hidden, output_hidden_states)
        if output_hidden_states:
            *before, last = states["hidden_states"]
            states["hidden_states"] = (*before, last.unflatten(0, shape))  # as in transformers
        by_choice: Any
        if isinstance(logits, LazyLogits):
            by_choice = logits.reshaped(shape)
        else:
            by_choice = torch.unflatten(logits, 0, shape)
        return DoubleHeadsOutput(loss, choice_loss, by_choice, scores, **states)


@dataclass
class DoubleHeadsOutput(ModelOutput):
    """The output of a `GPT2DoubleHeadsModel`.

    Attributes:
        loss: The loss of the language model, without that of the choices.
        mc_loss: The cross-entropy of the choices.
        logits: [B, C, S, Vp], as in `CausalLMOutput`.
        mc_logits: [B, C]. The other fields are as in `CausalLMOutput`.
    """

    loss: Tensor | None = None
    mc_loss: Tensor | None = None
    logits: Tensor = field(default_factory=absent)
    mc_logits: Tensor = field(default_factory=absent)
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class GPT2Model(BareModel, GPT2Backbone):
    """GPT-2 without a head."""


class GPT2ForSequenceClassification(SequenceClassification, GPT2Backbone):
    """GPT-2 that classifies a text."""

    pooling = "last"
    dropout_rate = None
    bias = False


class GPT2ForTokenClassification(TokenClassification, GPT2Backbone):
    """GPT-2 that classifies each token."""


class GPT2ForQuestionAnswering(QuestionAnswering, GPT2Backbone):
    """GPT-2 that finds the first and the last token of an answer."""

    positional_inputs = (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "position_ids",
        "inputs_embeds",
    )
