"""GLM (Du et al., 2021, "GLM: General Language Model Pretraining with Autoregressive Blank
Infilling").

- two learned positions for each token, added to its embedding: the position in the corrupted text
  (of the blank, for the tokens of a span), and the position within the span (0 in the corrupted
  text)
- part A, the corrupted text, attends to all of part A; part B, the spans, attends to part A and to
  earlier tokens of part B
- pre-LayerNorm blocks with a fused qkv and biases; the tanh approximation of GELU; a final norm
- the output head is the word embedding, without a bias
- decoding continues from the hidden states of earlier tokens (`mems`), from which each block
  computes keys and values
- initial weights N(0, 0.02), divided by √(2 · layers) if they write into the residual stream;
  biases zero
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...mpu import LayerNorm, ParallelMesh, VocabParallelEmbedding, VocabParallelHead
from ..blocks.attention import SelfAttention
from ..blocks.cache import Cache, LayerKVCache
from ..blocks.documents import Documents
from ..blocks.embeddings import PositionEmbedding
from ..blocks.masks import restart_positions
from ..blocks.mlp import MLP
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.stack import Block, BlockList
from ..generation.mixin import GenerationMixin
from ..language_model import VOCABULARY_MULTIPLE, LanguageModel
from ..outputs import ModelOutput, StageOutput, absent
from ..parallel_config import ParallelConfig, layer_arguments
from .config import GLMConfig
from .masks import visible_in_documents, visible_keys


class GLMBlock(Block):
    def __init__(
        self, config: GLMConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig
    ) -> None:
        super().__init__()
        size = config.hidden_size
        heads = config.num_attention_heads
        eps = config.layer_norm_eps
        shared = layer_arguments(mesh, parallel_config)
        self.ln_1 = LayerNorm(size, eps, **shared)
        self.attention = SelfAttention(
            size,
            heads,
            scale=(size // heads) ** -0.5,
            dropout=config.attention_dropout_prob,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        self.attention_dropout = residual_dropout(config.output_dropout_prob, mesh, parallel_config)
        self.ln_2 = LayerNorm(size, eps, **shared)
        self.mlp = MLP(
            size, 4 * size, config.hidden_act, mesh=mesh, parallel_config=parallel_config
        )
        self.mlp_dropout = residual_dropout(config.output_dropout_prob, mesh, parallel_config)

    def compute(
        self,
        x: Tensor,
        mask: Tensor | Documents | None,
        causal: bool,
        memory: Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            memory: [B, M, H], this block's inputs at earlier positions. `cache` holds their keys
                and values instead.
        """
        memory = None if memory is None else self.ln_1(memory)
        y, x = self.ln_1(x, return_residual=True)
        y = self.attention(y, mask, causal=causal, memory=memory, cache=cache)
        y, x = add_and_norm(self.ln_2, self.attention_dropout, y, x)
        return self.mlp_dropout(self.mlp(y), x)


class GLMForConditionalGeneration(LanguageModel, GenerationMixin):
    """GLM with its output head, which fills blanks. With `mesh=None` the model is not split."""

    config: GLMConfig
    generates = "blanks"
    positional_inputs = ("input_ids", "position_ids", "attention_mask", "labels", "mems")

    def __init__(
        self,
        config: GLMConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        config = self.take_config(config)
        parallel_config = parallel_config or ParallelConfig()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config
        self.sequence_parallel = parallel_config.sequence_parallel
        size = config.hidden_size
        positions = config.max_sequence_length + 1
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, size, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )
        self.position_embeddings = PositionEmbedding(positions, size, **shared)
        self.block_position_embeddings = PositionEmbedding(positions, size, **shared)
        self.embedding_dropout = residual_dropout(
            config.embedding_dropout_prob, mesh, parallel_config
        )
        self.blocks = BlockList(
            (GLMBlock(config, mesh, parallel_config) for _ in range(config.num_layers)),
            parallel_config,
        )
        self.final_norm = LayerNorm(size, config.layer_norm_eps, **shared)
        self.head = VocabParallelHead(size, config.vocab_size, tied=self.word_embeddings, **shared)
        self.init_parameters()

    def compute_outputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        seq_idx: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> GLMOutput | StageOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by
        `num_items_in_batch`.

        Under sequence parallelism, where each rank has a part of the positions, mems are not
        supported.

        Args:
            input_ids: int64 [B, S].
            position_ids: int64 [B or 1, 2, S], positions in the text and within the span; 0, 1, …
                and zeros by default.
            attention_mask: The length of part A [B], or a mask; see `visible_keys`.
            labels: int64 [B, S], the target at each position (of part B); -100 is ignored.
            mems: The mems that an earlier call returned; their M positions precede these.
            use_cache: Whether to return the mems of all M + S positions; by default in evaluation
                without labels.
            cache: The keys and values of the M earlier positions, instead of mems. It is extended
                in place and avoids computing them again; no mems are returned by default.
            logits_to_keep: The number of last positions whose logits are returned; 0 means all.
            seq_idx: int64 [B, S] or [1, S], the number of each token's document in packed rows.
                Positions in the text restart in each, unless `position_ids` says otherwise.
            prefix_lengths: The length of part A of each token's document, in the shape of
                `seq_idx`, instead of `attention_mask`.
        """
        if use_cache is None:
            use_cache = (
                not self.training
                and labels is None
                and not self.sequence_parallel
                and cache is None
                and seq_idx is None
            )
        if self.sequence_parallel and (use_cache or mems is not None):
            raise ValueError(
                "mems need the whole sequence on each rank: build the model without sequence "
                "parallelism"
            )
        batch, length = input_ids.shape
        memory = self.memory_length(mems) if cache is None else cache.length
        mask: Tensor | Documents | None
        if seq_idx is None:
            if prefix_lengths is not None:
                raise ValueError(
                    "prefix_lengths needs seq_idx; of one document, attention_mask [B] is the length"
                )
            mask, causal = visible_keys(attention_mask, batch, length, memory)
        else:
            if use_cache or memory:
                raise ValueError("seq_idx packs documents into a row: it needs a call without mems")
            mask, causal = visible_in_documents(seq_idx, prefix_lengths, attention_mask), True
            if position_ids is None:
                text = restart_positions(seq_idx)
                position_ids = torch.stack([text, torch.zeros_like(text)], 1)
        hidden = self.run_stack(
            self.blocks,
            embed=lambda: self.embed(input_ids, position_ids, memory),
            block_arguments=lambda layer: (
                mask,
                causal,
                mems and mems[layer],
                cache and cache.layers[layer],
            ),
        )
        if isinstance(hidden, StageOutput):
            return hidden
        # Later calls continue from the states before the final norm.
        states = hidden.states
        if use_cache or output_hidden_states:
            self.check_states_are_kept()
        new_mems = extend_mems(mems, states) if use_cache else None
        states[-1] = self.final_norm(states[-1])
        x = states[-1][:, -logits_to_keep:]
        loss, logits = self.loss_and_logits(self.head, x, labels, num_items_in_batch, hidden.table)
        return GLMOutput(loss, logits, new_mems, tuple(states) if output_hidden_states else None)

    def embed(
        self, input_ids: Tensor, position_ids: Tensor | None, memory: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the blocks' input, and the word embedding table for the head."""
        if position_ids is None:
            if memory:
                raise ValueError("with mems or a cache, pass the position_ids of the new tokens")
            length = input_ids.shape[1]
            positions = self.position_embeddings.num_embeddings
            if length > positions:
                raise ValueError(
                    f"the sequence has {length} tokens, but the model has only {positions} "
                    "positions"
                )
            text = torch.arange(length, device=input_ids.device)
            position_ids = torch.stack([text, torch.zeros_like(text)])[None]
        if position_ids.dim() != 3 or position_ids.shape[1:] != (2, input_ids.shape[1]):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; use [B, 2, "
                f"{input_ids.shape[1]}], the positions "
                "in the text and within the span"
            )
        text, span = position_ids.unbind(1)
        x, table = self.word_embeddings.embed(input_ids)
        x = x + self.position_embeddings(text) + self.block_position_embeddings(span)
        return self.embedding_dropout(x), table

    def memory_length(self, mems: Sequence[Tensor] | None) -> int:
        if mems is None:
            return 0
        if len(mems) != len(self.blocks) + 1:
            raise ValueError(
                f"mems has {len(mems)} tensors, but {len(self.blocks)} blocks need "
                f"{len(self.blocks) + 1}"
            )
        return mems[0].shape[1]

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
                std /= math.sqrt(2 * self.config.num_layers)
            full.normal_(0.0, std, generator=generator)


def extend_mems(mems: Sequence[Tensor] | None, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the hidden states of all positions so far, [B, M + S, H] for the embedding and for
    each block.
    """
    if mems is None:
        return tuple(state.detach() for state in new)
    return tuple(
        torch.cat([old, state.detach()], dim=1) for old, state in zip(mems, new, strict=True)
    )


@dataclass
class GLMOutput(ModelOutput):
    """The output of a GLM.

    Attributes:
        loss, logits: As in `CausalLMOutput`.
        mems: The embedding output and each block's output at all positions so far, [B, M + S, H]
            each, before the final norm and detached; the next call takes them as `mems`. None
            unless requested.
        hidden_states: The same for this call's positions, the last one after the final norm; None
            unless requested.
        attentions: As in `CausalLMOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor = field(default_factory=absent)
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
