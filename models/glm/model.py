"""GLM (Du et al., 2021, "GLM: General Language Model Pretraining with Autoregressive Blank Infilling").

- two positions for each token, learned and added to its embedding: where it or its span stands in the corrupted text,
  and its place within the span (0 in the text itself)
- part A, the corrupted text, sees all of itself; part B, the spans, sees part A and what precedes in part B
- pre-LayerNorm blocks with fused, bias-carrying qkv; GELU by its tanh approximation; one more norm at the end
- the output head is the word embedding, without a bias
- decoding continues from the hidden states of earlier tokens (`mems`), of which each block computes keys and values
- weights N(0, 0.02), those that write into the residual stream smaller by √(2 · layers); biases zero
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...mpu import LayerNorm, ParallelMesh, VocabParallelEmbedding, VocabParallelHead, checkpoint
from ..common.cache import Cache, LayerKVCache
from ..common.language_model import VOCABULARY_MULTIPLE, LanguageModel, ModelOutput, PositionEmbedding
from ..common.parallel_config import ParallelConfig, layer_arguments, residual_dropout
from ..common.transformer import MLP, SelfAttention
from .config import GLMConfig


class GLMBlock(nn.Module):
    def __init__(self, config: GLMConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> None:
        super().__init__()
        size, heads, eps = config.hidden_size, config.num_attention_heads, config.layer_norm_eps
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
        self.mlp = MLP(size, 4 * size, config.hidden_act, mesh=mesh, parallel_config=parallel_config)
        self.mlp_dropout = residual_dropout(config.output_dropout_prob, mesh, parallel_config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        causal: bool,
        memory: Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """memory: [B, M, H], this block's inputs at earlier positions; or their keys and values in `cache`."""
        memory = None if memory is None else self.ln_1(memory)
        y = self.attention(self.ln_1(x), mask, causal=causal, memory=memory, cache=cache)
        x = x + self.attention_dropout(y)
        return x + self.mlp_dropout(self.mlp(self.ln_2(x)))


class GLMForConditionalGeneration(LanguageModel):
    """GLM with its output head: fills in blanks. `mesh=None` is the unsplit model."""

    config: GLMConfig
    generates = "blanks"

    def __init__(
        self, config: GLMConfig, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__()
        parallel_config = parallel_config or ParallelConfig()
        self.config, self.mesh, self.parallel_config = config, mesh, parallel_config
        self.sequence_parallel = parallel_config.sequence_parallel
        self.recompute_blocks = parallel_config.recompute == "full"
        size, positions = config.hidden_size, config.max_sequence_length + 1
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, size, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )
        self.position_embeddings = PositionEmbedding(positions, size, **shared)
        self.block_position_embeddings = PositionEmbedding(positions, size, **shared)
        self.embedding_dropout = residual_dropout(config.embedding_dropout_prob, mesh, parallel_config)
        self.blocks = nn.ModuleList(GLMBlock(config, mesh, parallel_config) for _ in range(config.num_layers))
        self.final_norm = LayerNorm(size, config.layer_norm_eps, **shared)
        self.head = VocabParallelHead(size, config.vocab_size, tied=self.word_embeddings, **shared)

    def forward(
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
    ) -> GLMOutput:
        """input_ids: int64 [B, S]. position_ids: int64 [B or 1, 2, S], positions in the text and within the span; by
        default 0, 1, … and zeros. attention_mask: the length of part A [B], or a mask; see `masks.visible_keys`.

        labels: int64 [B, S], of the position itself (part B's targets); -100 is ignored. The loss is the mean over
        the labels, or their sum divided by `num_items_in_batch`.
        mems: what an earlier call returned; its M positions precede these. use_cache: whether to return the mems of
        all M + S positions; by default when not training and without labels. Neither works under sequence
        parallelism, where a rank has a part of the positions.
        cache: the same memory as keys and values, which is extended in place and takes no products again; no mems are
        returned then. logits_to_keep: of how many last positions; 0 is all.
        """
        if use_cache is None:
            use_cache = not self.training and labels is None and not self.sequence_parallel and cache is None
        if self.sequence_parallel and (use_cache or mems is not None):
            raise ValueError("mems need whole sequences on a rank: build the model without sequence parallelism")
        (batch, length), memory = input_ids.shape, self.memory_length(mems) if cache is None else cache.length
        x, table = self.embed(input_ids, position_ids, memory)  # [B, S, H], or [B, S/tp, H] under sequence parallelism
        mask, causal = visible_keys(attention_mask, batch, length, memory)
        hidden_states = [x]
        for i, block in enumerate(self.blocks):
            earlier = None if mems is None else mems[i]
            arguments = (x, mask, causal, earlier, None if cache is None else cache.layers[i])
            x = checkpoint(block, *arguments) if self.recompute_blocks else block(*arguments)
            hidden_states.append(x)
        new_mems = extend_mems(mems, hidden_states) if use_cache else None
        x = self.final_norm(x)
        hidden_states[-1] = x
        loss, logits = self.loss_and_logits(self.head, x[:, -logits_to_keep:], labels, num_items_in_batch, table)
        hidden = tuple(hidden_states) if output_hidden_states else None
        return GLMOutput(loss, logits, new_mems, hidden)

    def embed(self, input_ids: Tensor, position_ids: Tensor | None, memory: int) -> tuple[Tensor, Tensor]:
        """The blocks' input, and the word embeddings' table for the head."""
        if position_ids is None:
            if memory:
                raise ValueError("with mems, position_ids must say where the new tokens stand")
            length, positions = input_ids.shape[1], self.position_embeddings.num_embeddings
            if length > positions:
                raise ValueError(f"the sequence has {length} tokens, but the model only {positions} positions")
            text = torch.arange(length, device=input_ids.device)
            position_ids = torch.stack([text, torch.zeros_like(text)])[None]
        if position_ids.dim() != 3 or position_ids.shape[1:] != (2, input_ids.shape[1]):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; use [B, 2, {input_ids.shape[1]}], positions in "
                "the text and within the span"
            )
        text, span = position_ids.unbind(1)
        x, table = self.word_embeddings.embed(input_ids)
        x = x + self.position_embeddings(text) + self.block_position_embeddings(span)
        return self.embedding_dropout(x), table

    def memory_length(self, mems: Sequence[Tensor] | None) -> int:
        if mems is None:
            return 0
        if len(mems) != len(self.blocks) + 1:
            raise ValueError(f"mems has {len(mems)} tensors, but {len(self.blocks)} blocks need {len(self.blocks) + 1}")
        return mems[0].shape[1]

    def init_weights(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Fills a parameter's unsplit value in place."""
        if name.endswith(".bias"):
            full.zero_()
        elif "ln_" in name or "norm" in name:
            full.fill_(1.0)
        else:
            writes_residual = name.endswith((".output.weight", ".down.weight"))
            std = self.config.initializer_range / (math.sqrt(2 * self.config.num_layers) if writes_residual else 1.0)
            full.normal_(0.0, std, generator=generator)


def extend_mems(mems: Sequence[Tensor] | None, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The cached hidden states of all positions so far, [B, M + S, H] for the embedding and for each block."""
    if mems is None:
        return tuple(state.detach() for state in new)
    return tuple(torch.cat([old, state.detach()], dim=1) for old, state in zip(mems, new, strict=True))


def visible_keys(attention_mask: Tensor | None, batch: int, queries: int, memory: int) -> tuple[Tensor | None, bool]:
    """(bool mask broadcastable to [B, N, S, M + S], causal), where B = `batch`, and S = `queries` new positions follow
    M = `memory` cached ones.

    attention_mask is one of
    - None: causal.
    - numbers [B], [1], [B, 1] or a scalar, the length of part A: its positions are seen by all of this sequence, those
      of part B by themselves and what follows; all memory is seen.
    - [B, ≥ M + S]: nonzero for the keys that every query sees.
    - [B or 1, N or 1, S or 1, ≥ M + S]: nonzero where a query sees a key. Of longer masks the last M + S columns count.
    """
    if attention_mask is None:
        return None, True
    shape, keys = attention_mask.shape, memory + queries
    fits = not shape or shape[0] in (1, batch)
    if fits and (len(shape) < 2 or shape[1:] == (1,)):
        prefix = attention_mask.reshape(-1, 1, 1, 1)
        key = torch.arange(-memory, queries, device=attention_mask.device)  # negative in memory
        query = torch.arange(queries, device=attention_mask.device)[:, None]
        return (key <= query) | (key < prefix), False  # [B, 1, S, M + S]
    if fits and len(shape) == 2 and shape[1] >= keys:
        return attention_mask.bool()[:, None, None, -keys:], False
    if fits and len(shape) == 4 and shape[2] in (1, queries) and shape[3] >= keys:
        return attention_mask.bool()[..., -keys:], False
    raise ValueError(
        f"attention_mask has shape {tuple(shape)}; for {batch} x {queries} tokens after {memory} cached ones use "
        f"[{batch}] (the length of part A), [{batch}, {keys}] or [{batch}, 1, {queries}, {keys}]"
    )


@dataclass
class GLMOutput(ModelOutput):
    """loss: scalar fp32, mean over the labels that are not -100; None without labels.

    logits: [B, S, Vp], this rank's columns of the padded vocabulary ([B, S, V] in one process);
        `model.gather_logits` gives [B, S, V]. With labels they are calculated when first read.
    mems: the embedding output and each block's output at all positions so far, [B, M + S, H] each, before the final
        norm and cut off from autograd; what the next call takes as `mems`. None where not asked for.
    hidden_states: the same of this call's positions, the last one after the final norm; None unless asked for.
    """

    loss: Tensor | None
    logits: Tensor
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
