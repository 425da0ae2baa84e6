"""What a model keeps for its backward pass, in bytes per rank, from its configuration; see docs/estimate.md.

Each family says what its blocks are made of (`Family.activations`). What such a block keeps is one formula, which the
tests compare with what autograd saves, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from .common.parallel_config import ParallelConfig
from .common.transformer import MAX_EAGER_SCORES

FP32 = 4
INT64 = 8
FUSED_GATES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")  # activations of `GatedMLP`
NOTHING_SPECIAL = ParallelConfig()


@dataclass(frozen=True)
class Batch:
    """A micro-batch. size: sequences; length: tokens in each, of an encoder-decoder's source; target_length: of its
    target. padded: whether an attention mask is given."""

    size: int
    length: int
    target_length: int = 0
    padded: bool = False


@dataclass(frozen=True)
class Layout:
    """How the model runs. itemsize: bytes of an activation's element. device: the type of torch's."""

    itemsize: int
    tensor_parallel_size: int = 1
    parallel_config: ParallelConfig = NOTHING_SPECIAL
    device: str = "cpu"

    @property
    def sequence_split(self) -> int:
        """Over how many ranks norms, residuals and dropouts are split."""
        return self.tensor_parallel_size if self.parallel_config.sequence_parallel else 1


@dataclass(frozen=True)
class Block:
    """What a block is made of.

    Args:
        mlp_kept: tensors of the feed-forward width that are kept.
        dropouts: on the residual stream, of which a key is kept.
        statistics: numbers that a norm keeps per token: 2 of a LayerNorm, 1 of an RMSNorm.
        bias: whether a trained bias is added to the scores.
        cross: whether the block attends to a source too.
        gated: whether the feed-forward block has a gate.
        key_value_heads: for grouped-query attention; heads by default.
        rotary: whether queries and keys are rotated.
    """

    hidden: int
    heads: int
    head_size: int
    feed_forward: int
    mlp_kept: int
    attention_dropout: bool
    dropouts: int
    statistics: int
    causal: bool = False
    bias: bool = False
    cross: bool = False
    gated: bool = False
    key_value_heads: int | None = None
    rotary: bool = False

    @property
    def key_value_size(self) -> int:
        """Features of the keys."""
        return (self.key_value_heads or self.heads) * self.head_size


@dataclass(frozen=True)
class Stack:
    """layers equal blocks whose modules' names begin with `path`. is_decoder: works on the target's tokens."""

    path: str
    layers: int
    block: Block
    is_decoder: bool = False


@dataclass(frozen=True)
class Activations:
    """A model's stacks in the order of a forward pass. ends: how many tensors as large as the residual stream are kept
    outside the blocks, for each of source and target: by default the input and the output of the last norm."""

    stacks: tuple[Stack, ...]
    ends: int = 2


@dataclass(frozen=True)
class BlockBytes:
    """kept: between forward and backward. working: what exists beyond that in the block's backward pass: what is made
    again, and gradients inside."""

    kept: int
    working: int


def block_bytes(stack: Stack, batch: Batch, layout: Layout) -> BlockBytes:
    """Of one block of a stack."""
    everything = _kept(stack, batch, layout, without_core=False)
    if layout.parallel_config.recompute == "full":
        kept = _stream(stack, batch, layout)
        return BlockBytes(kept, everything - kept + _working(stack, batch, layout))
    if layout.parallel_config.recompute == "selective":
        kept = _kept(stack, batch, layout, without_core=True)
        return BlockBytes(kept, _working(stack, batch, layout, recomputed=everything - kept))
    return BlockBytes(everything, _working(stack, batch, layout))


def end_bytes(activations: Activations, batch: Batch, layout: Layout) -> int:
    """Embeddings, the last norm and the head, without the logits."""
    hidden = activations.stacks[0].block.hidden
    return (
        activations.ends
        * batch.size
        * (batch.length + batch.target_length)
        * hidden
        * layout.itemsize
        // (layout.sequence_split)
    )


def logit_bytes(columns: int, batch: Batch, layout: Layout) -> int:
    """The logits, of which a rank has `columns`; their gradient is as large."""
    length = batch.target_length or batch.length
    return batch.size * length * columns * layout.itemsize


def _stream(stack: Stack, batch: Batch, layout: Layout) -> int:
    """The residual stream: n elements."""
    return _tokens(stack, batch) * stack.block.hidden * layout.itemsize // layout.sequence_split


def _tokens(stack: Stack, batch: Batch) -> int:
    return batch.size * (batch.target_length if stack.is_decoder else batch.length)


def _kept(stack: Stack, batch: Batch, layout: Layout, *, without_core: bool) -> int:
    block, e, t = stack.block, layout.itemsize, layout.tensor_parallel_size
    tokens, inner = _tokens(stack, batch), block.heads * block.head_size
    norms = 3 if block.cross else 2
    # A norm's input, output and statistics.
    total = norms * (2 * _stream(stack, batch, layout) + tokens * block.statistics * FP32 // layout.sequence_split)
    total += _attention_features(stack, batch, layout, without_core=without_core) * tokens * e // t
    lengths = [_own_length(stack, batch)]
    if block.cross:
        total += (2 * tokens + 2 * batch.size * batch.length) * inner * e // t
        lengths.append(batch.length)
    for number, keys in enumerate(lengths):
        total += _core(stack, batch, layout, keys, crosses=number == 1, recomputed=without_core)
    feed_forward = -(-block.feed_forward // t)
    total += block.mlp_kept * tokens * feed_forward * e
    if block.gated and t > 1:
        total += 2 * feed_forward * block.hidden * e  # both products' weights, stacked so that one exchange serves both
    keys_of_dropouts = block.dropouts + (len(lengths) if block.attention_dropout and not without_core else 0)
    return total + keys_of_dropouts * batch.size * INT64


def _attention_features(stack: Stack, batch: Batch, layout: Layout, *, without_core: bool) -> int:
    """Features of q, k, v and of what attention makes of them, that are kept for a token."""
    block, length = stack.block, _own_length(stack, batch)
    inner, key_value = block.heads * block.head_size, block.key_value_size
    qkv = inner + 2 * key_value
    eager = not without_core and _weights_are_written(block, layout, length, length, crosses=False)
    if key_value != inner and eager:  # k and v are kept with each head repeated
        return 4 * inner + (0 if block.rotary else qkv - inner)
    return qkv + inner + (inner + key_value if block.rotary else 0)  # v is a part of qkv, which is kept whole


def _own_length(stack: Stack, batch: Batch) -> int:
    return batch.target_length if stack.is_decoder else batch.length


def _core(stack: Stack, batch: Batch, layout: Layout, keys: int, *, crosses: bool, recomputed: bool) -> int:
    """What attention keeps besides queries, keys, values and its output."""
    block, queries = stack.block, _own_length(stack, batch)
    if recomputed:
        return 0
    weights = batch.size * block.heads * queries * keys * layout.itemsize // layout.tensor_parallel_size
    if block.attention_dropout:
        return 2 * weights
    if _weights_are_written(block, layout, queries, keys, crosses):
        return weights
    log_sums = batch.size * block.heads * queries * FP32 // layout.tensor_parallel_size
    if not batch.padded:
        return log_sums
    rows = queries if block.causal and not crosses else 1
    return log_sums + batch.size * rows * keys * layout.itemsize  # the mask, as numbers that are added


def _weights_are_written(block: Block, layout: Layout, queries: int, keys: int, crosses: bool) -> bool:
    by_products = layout.device == "cpu" and layout.itemsize == 2 and queries * keys <= MAX_EAGER_SCORES
    return block.attention_dropout or (block.bias and not crosses) or by_products


def _working(stack: Stack, batch: Batch, layout: Layout, recomputed: int = 0) -> int:
    """What exists in a block's backward beyond what it kept: the gradients of the stream, and of an activation or
    what it is taken of inside the feed-forward block; or inside attention, when the other's tensors are gone.

    recomputed: of attention's core.
    """
    block, e, t = stack.block, layout.itemsize, layout.tensor_parallel_size
    tokens = _tokens(stack, batch)
    wide = tokens * -(-block.feed_forward // t) * e
    inner = tokens * block.heads * block.head_size * e // t
    length = _own_length(stack, batch)
    attention = 4 * inner
    if _weights_are_written(block, layout, length, length, crosses=False):
        # Their gradient is there with those of the output and of the values only.
        attention = max(batch.size * block.heads * length**2 * e // t + 2 * inner, attention)
    attention += recomputed - block.mlp_kept * wide - 2 * _stream(stack, batch, layout)  # its norm's input and output
    return 2 * tokens * block.hidden * e + max(wide * (2 if block.gated else 1), attention)
