"""Computes the bytes per rank that a model keeps for its backward pass, from its configuration; see
docs/estimate.md.

Each family describes its blocks (`Family.activations`). One formula gives the bytes that such a
block keeps; tests check that it equals what autograd saves, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..mpu.division import find_first_unit
from ..ops.attention import choose_block_rows, has_attention_kernel, suits_tiles, writes_scores
from ..ops.linear_cross_entropy import ROW_CHUNK_DEVICES, count_part_logits, suits_parts
from .parallel_config import WHOLE_BLOCKS, ParallelConfig

FP32 = 4
INT64 = 8
# The activations that `GatedMLP` fuses with the product of gate and up.
FUSED_GATES = (
    "gelu",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "silu",
    "swish",
)
# What an activation keeps for its gradient, where that is not its input alone.
KEPT_BY_ACTIVATION = {
    "gelu_10": {"input", "inner"},
    "laplace": {"inner"},
    "linear": set[str](),
    "quick_gelu": {"input", "inner"},
    "relu": {"output"},
    "relu2": {"inner"},
    "sigmoid": {"output"},
    "sqrtsoftplus": {"input", "output"},
    "tanh": {"output"},
}
NOTHING_SPECIAL = ParallelConfig()


def count_mlp_tensors(activation: str, drops: bool) -> int:
    """Returns the number of tensors as wide as the inside of an `MLP` that it keeps.

    Args:
        activation: The activation's name.
        drops: Whether a dropout follows the activation.
    """
    kept = KEPT_BY_ACTIVATION.get(activation, {"input"}) | {"input of down"}
    if not drops:
        kept -= {"output"}  # which is the input of `down`
    return len(kept)


def count_gated_mlp_tensors(activation: str, fused: bool) -> int:
    """Returns the number of tensors as wide as the inside of a `GatedMLP` that it keeps.

    Args:
        activation: The activation's name.
        fused: Whether gate and up are one parameter. Their outputs are then halves of one tensor,
            which up keeps as a whole.
    """
    if activation in FUSED_GATES or activation == "linear":
        return len(("gate", "up", "input of down"))
    kept = KEPT_BY_ACTIVATION.get(activation, {"input"}) | {"output", "up", "input of down"}
    if fused:
        kept |= {"input"}
    return len(kept)


@dataclass(frozen=True)
class Batch:
    """The sizes of a micro-batch."""

    size: int  # sequences
    length: int  # tokens in a sequence; in an encoder-decoder's source
    target_length: int = 0  # tokens in an encoder-decoder's target
    padded: bool = False  # whether there is an attention mask


@dataclass(frozen=True)
class Layout:
    """How the model runs."""

    itemsize: int  # bytes of an element of the activations
    tensor_parallel_size: int = 1
    parallel_config: ParallelConfig = NOTHING_SPECIAL
    device: str = "cpu"  # PyTorch's device type

    @property
    def sequence_split(self) -> int:
        """The number of ranks over which norms, residuals and dropouts are split."""
        return self.tensor_parallel_size if self.parallel_config.sequence_parallel else 1


@dataclass(frozen=True)
class LatentSizes:
    """The widths of latent attention; see `blocks/latent_attention.py`.

    Attributes:
        query_rank: The width of the queries' latent vector; 0 for none.
        rank: That of the latent vector of keys and values.
        nope, rope, value: The features of a head.
    """

    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int

    @property
    def head_size(self) -> int:
        """The features of a head in attention, which pads queries and keys or values."""
        return max(self.nope + self.rope, self.value)


@dataclass(frozen=True)
class BlockSpec:
    """The parts of a transformer block that determine what it keeps.

    Attributes:
        feed_forward: Features inside the feed-forward block.
        mlp_kept: The number of tensors as wide as the feed-forward block that are kept.
        dropouts: The number of dropouts on the residual stream; each keeps a key.
        statistics: Numbers that a norm keeps per token: 2 for a LayerNorm, 1 for an RMSNorm.
        bias: Whether a trained bias is added to the scores.
        own_bias: Whether each block computes its own bias; otherwise the blocks of a stack share
            one.
        cross: Whether the block also attends to a source.
        merged: Whether its attention sees the keys of a source behind its own.
        gated: Whether the feed-forward block has a gate.
        fused: Whether the gate and the up projection are one parameter.
        key_value_heads: The number of key and value heads for grouped-query attention; by default
            `heads`.
        rotary: Whether queries and keys are rotated.
        qk_norm: Whether each head's queries and keys pass through an RMSNorm.
        all_heads_norm: Whether that norm is over all heads together.
        rounds_once: Whether it multiplies by the weight before it rounds.
        input_norms: Whether the inputs of attention and feed-forward block pass through a norm.
        output_norms: Whether the outputs of attention and feed-forward block pass through a norm
            before they are added.
        capped: Whether a soft cap bounds the scores.
        position_terms: The number of terms of relative positions in the scores, which have products
            with `positions` embeddings.
        block_length: The number of queries of a block of local attention, which sees its own keys
            and those of both neighbors; 0 for attention to all keys.
        summed: The number of positions whose sum is one more key of each block; 0 for no sums.
        window: Each position attends only to those at most so far away; None for all positions.
        borrows: Whether the projection of queries, keys and values is put together from rows of
            several ranks.
        routed: The number of experts of each token, of a mixture; `feed_forward` is the width of
            all of them together.
        experts: The number of experts of a mixture.
        normalized: Whether the weights of a token's experts are divided by their sum.
        shared_expert: Whether an expert that computes every token is added, times a gate.
        chosen_first: Whether a token's weights are probabilities among its chosen experts alone.
        expert_biases: Whether the experts and their router have biases.
        sinks: Whether attention has sinks, with which it always computes the scores in tiles.
        corrected: Whether the mixture is that of `blocks/corrected_moe.py`, whose router computes
            in fp32 and whose shared expert has no gate.
        latent: The widths of latent attention; None for ordinary attention.
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
    own_bias: bool = False
    cross: bool = False
    merged: bool = False
    gated: bool = False
    fused: bool = False
    key_value_heads: int | None = None
    rotary: bool = False
    qk_norm: bool = False
    all_heads_norm: bool = False
    rounds_once: bool = False
    input_norms: bool = True
    output_norms: bool = False
    capped: bool = False
    position_terms: int = 0
    positions: int = 0
    block_length: int = 0
    summed: int = 0
    window: int | None = None
    borrows: bool = False
    routed: int = 0
    experts: int = 0
    normalized: bool = False
    shared_expert: bool = False
    chosen_first: bool = False
    expert_biases: bool = False
    sinks: bool = False
    corrected: bool = False
    latent: LatentSizes | None = None

    def on_rank(self, size: int) -> BlockSpec:
        """Returns the part of the block that the busiest of `size` ranks computes."""
        kept = self.key_value_heads or self.heads
        parts = [
            (find_first_unit(self.heads, rank, size), find_first_unit(self.heads, rank + 1, size))
            for rank in range(size)
        ]
        queries_per_kv = self.heads // kept
        return replace(
            self,
            heads=-(-self.heads // size),
            key_value_heads=max(
                -(-stop // queries_per_kv) - start // queries_per_kv for start, stop in parts
            ),
            feed_forward=-(-self.feed_forward // size),
            borrows=queries_per_kv > 1 and kept % size > 0,
        )

    @property
    def key_value_size(self) -> int:
        """Features of all keys, or of all values, of a token."""
        return (self.key_value_heads or self.heads) * self.head_size


@dataclass(frozen=True)
class StackSpec:
    """A stack of equal blocks."""

    path: str  # prefix of the names of the blocks' modules
    layers: int
    block: BlockSpec
    is_decoder: bool = False  # whether the stack works on the target's tokens


@dataclass(frozen=True)
class Activations:
    """The stacks of a model, in the order of the forward pass.

    `ends` is the number of tensors as large as the residual stream that are kept outside the
    blocks, for each of source and target; by default the input and the output of the last norm.
    """

    stacks: tuple[StackSpec, ...]
    ends: int = 2


@dataclass(frozen=True)
class BlockBytes:
    """The memory of one block in bytes.

    Attributes:
        kept: What stays between the forward and the backward pass.
        working: What the block's backward pass needs besides: recomputed tensors, inner gradients.
    """

    kept: int
    working: int


def block_bytes(stack: StackSpec, batch: Batch, layout: Layout) -> BlockBytes:
    """Returns the memory of one block of a stack, on the rank with the most heads."""
    stack = replace(stack, block=stack.block.on_rank(layout.tensor_parallel_size))
    everything = _kept(stack, batch, layout, without_core=False)
    if layout.parallel_config.recompute in WHOLE_BLOCKS:
        kept = _stream(stack, batch, layout)
        working = everything - kept + _working(stack, batch, layout)
        if layout.parallel_config.recompute == "full" or layout.device == "cpu":
            return BlockBytes(kept, working)
        # Of inputs that go to the host, the device has that of the block that runs, and one that
        # leaves or arrives.
        return BlockBytes(0, working + 2 * kept)
    if layout.parallel_config.recompute == "selective":
        kept = _kept(stack, batch, layout, without_core=True)
        return BlockBytes(kept, _working(stack, batch, layout, recomputed=everything - kept))
    return BlockBytes(everything, _working(stack, batch, layout))


def end_bytes(activations: Activations, batch: Batch, layout: Layout) -> int:
    """Returns the bytes kept by the embeddings, the last norm and the head, without the logits."""
    hidden = activations.stacks[0].block.hidden
    tokens = batch.size * (batch.length + batch.target_length)
    stream = tokens * hidden * layout.itemsize
    return activations.ends * stream // layout.sequence_split


def logit_bytes(columns: int, batch: Batch, layout: Layout) -> int:
    """Returns the bytes of a rank's logits that exist at a time; the gradient replaces them.

    Args:
        columns: The rank's part of the vocabulary, Vp.
    """
    tokens = batch.size * (batch.target_length or batch.length)
    elements = tokens * columns
    if suits_parts(tokens, columns):
        elements = count_part_logits(tokens, columns, layout.device)
    return elements * layout.itemsize


def head_sum_bytes(
    shape: tuple[int, ...], batch: Batch, layout: Layout, *, is_trained: bool
) -> int:
    """Returns the bytes in which the loss sums gradients over parts of the logits.

    On a CPU that is the gradient of a 16-bit head. On an accelerator it is the gradient of the
    hidden states, and the memory of the head's own gradient exists from the forward pass on.

    Args:
        shape: The rank's part of the head, [Vp, H].
    """
    columns, features = shape
    tokens = batch.size * (batch.target_length or batch.length)
    if not suits_parts(tokens, columns):
        return 0
    if layout.device not in ROW_CHUNK_DEVICES:
        head = columns * features * layout.itemsize if is_trained else 0
        return head + FP32 * tokens * features
    return FP32 * columns * features if layout.itemsize < FP32 else 0


def _stream(stack: StackSpec, batch: Batch, layout: Layout) -> int:
    """Returns the bytes of the residual stream on a rank: n elements in docs/estimate.md."""
    return _tokens(stack, batch) * stack.block.hidden * layout.itemsize // layout.sequence_split


def _tokens(stack: StackSpec, batch: Batch) -> int:
    return batch.size * (batch.target_length if stack.is_decoder else batch.length)


def _kept(stack: StackSpec, batch: Batch, layout: Layout, *, without_core: bool) -> int:
    """Returns the bytes that a block keeps.

    Args:
        without_core: Whether the core of attention (scores, weights, dropout) is recomputed.
    """
    block = stack.block
    e = layout.itemsize
    t = layout.tensor_parallel_size
    tokens = _tokens(stack, batch)
    inner = block.heads * block.head_size
    norms = 3 if block.cross else 2
    # The input, the output and the statistics of each norm.
    total = norms * (
        2 * _stream(stack, batch, layout)
        + tokens * block.statistics * FP32 // layout.sequence_split
    )
    if not block.input_norms:  # the inputs of attention and feed-forward block alone
        total = norms * _stream(stack, batch, layout)
    if block.output_norms:  # the input and the statistics of each
        total += norms * (
            _stream(stack, batch, layout)
            + tokens * block.statistics * FP32 // layout.sequence_split
        )
    if block.all_heads_norm:
        total += _all_heads_norm(stack, batch, layout)
    elif block.qk_norm:  # the statistics of each head; the inputs are parts of qkv
        total += tokens * (inner + block.key_value_size) // block.head_size * FP32
    lengths = [_own_length(stack, batch)]
    if block.block_length:
        total += _local_attention(stack, batch, layout, without_core=without_core)
    elif block.merged:
        total += _merged_attention(stack, batch, layout, without_core=without_core)
    elif block.latent is None:
        total += _attention_features(stack, batch, layout, without_core=without_core) * tokens * e
    else:
        total += _latent_attention(stack, batch, layout, block.latent, without_core=without_core)
    if block.cross:
        # Weights that are written are multiplied by keys and values with each head repeated.
        eager = not without_core and _materializes_weights(
            block, layout, lengths[0], batch.length, crosses=True
        )
        key_value = inner if eager else block.key_value_size
        total += (2 * tokens * inner + 2 * batch.size * batch.length * key_value) * e
        lengths.append(batch.length)
    for number, keys in enumerate(lengths):
        if number == 0 and (block.block_length or block.merged):
            continue
        total += _core(stack, batch, layout, keys, crosses=number == 1, recomputed=without_core)
    if block.own_bias and _in_blocks(block, layout, lengths[0], lengths[0], crosses=False):
        total += block.heads * (2 * lengths[0] - 1) * e
    elif block.own_bias and without_core:  # an input of the recomputed core
        total += block.heads * lengths[0] ** 2 * e
    if block.borrows:  # The weight is kept as it is put together from several ranks' rows.
        total += (inner + 2 * block.key_value_size) * block.hidden * e
    total += block.mlp_kept * tokens * block.feed_forward * e
    if block.routed:
        total += _mixture(stack, batch, layout)
    if block.position_terms:
        total += _position_terms(stack, batch, layout, recomputed=without_core)
    if block.gated and not block.fused and t > 1:
        # The weights of gate and up are stacked for a single collective.
        total += 2 * block.feed_forward * block.hidden * e
    if block.attention_dropout and not block.block_length and not block.merged:
        dropping = [
            not without_core or _in_blocks(block, layout, lengths[0], keys, crosses=False)
            for keys in lengths
        ]
        total += sum(dropping) * batch.size * INT64
    return total + block.dropouts * batch.size * INT64


def _all_heads_norm(stack: StackSpec, batch: Batch, layout: Layout) -> int:
    """Returns the bytes that the norms of all heads' queries and keys keep."""
    block = stack.block
    tokens = _tokens(stack, batch)
    features = block.heads * block.head_size + block.key_value_size
    # The normalized values, and the statistics.
    total = tokens * (features * (FP32 if block.rounds_once else layout.itemsize) + 2 * FP32)
    if layout.itemsize < FP32:  # queries and keys in fp32, and the weights if they are not rounded
        total += (tokens + block.rounds_once) * features * FP32
    return total


def _position_terms(stack: StackSpec, batch: Batch, layout: Layout, *, recomputed: bool) -> int:
    """Returns the bytes that the terms of relative positions keep."""
    block = stack.block
    e = layout.itemsize
    inner = block.heads * block.head_size
    length = _own_length(stack, batch)
    # Copies of the queries or keys and of the positions' projections, and their products.
    features = length * inner + inner * block.positions + block.heads * length * block.positions
    total = block.position_terms * batch.size * features * e
    if recomputed:  # The sum of the terms is an input of what is computed again.
        total += batch.size * block.heads * length**2 * e
    if block.dropouts:  # of the positions' embeddings
        total += block.positions * block.hidden * e + INT64
    return total


def _mixture(stack: StackSpec, batch: Batch, layout: Layout) -> int:
    """Returns the bytes that the routing of a mixture keeps, and its experts besides their inner
    features.
    """
    block = stack.block
    e = layout.itemsize
    tokens = _tokens(stack, batch)
    # Each expert's input and output of a token.
    total = 2 * block.routed * tokens * block.hidden * e
    # The probabilities of all experts, the chosen ones, their weights and their sorted order.
    if not block.chosen_first:
        total += tokens * block.experts * FP32
    total += tokens * block.routed * (2 * INT64 + FP32)
    if block.expert_biases:  # The expert of each row, for both projections.
        total += tokens * block.routed * 2 * INT64
    if block.normalized:  # The weights before, and their sum.
        total += tokens * (block.routed + 1) * FP32
    if block.corrected:
        # The router's input and weight in fp32, if the model has another type.
        if e < FP32:
            total += tokens * block.hidden * FP32 // layout.sequence_split
            total += block.experts * block.hidden * FP32
        return total
    weights = block.experts
    if block.shared_expert:  # Its output and its gate.
        total += _stream(stack, batch, layout)
        total += tokens * e // layout.sequence_split
        weights += 1
    if layout.sequence_split > 1:
        # The weights of the router and of the gate are put together for their all-reduce.
        total += weights * block.hidden * e
        if block.expert_biases:
            total += block.experts * e
    return total


def _attention_features(
    stack: StackSpec, batch: Batch, layout: Layout, *, without_core: bool
) -> int:
    """Returns the features per token that are kept of q, k, v and the attention output."""
    block = stack.block
    length = _own_length(stack, batch)
    inner = block.heads * block.head_size
    key_value = block.key_value_size
    qkv = inner + 2 * key_value
    eager = not without_core and _materializes_weights(block, layout, length, length, crosses=False)
    if (eager and (key_value != inner or block.rotary)) or inner % key_value:
        # k and v are kept with each head repeated, or v as a copy.
        kept = 4 * inner
        # Norms of all heads keep copies in fp32 of their inputs.
        has_copies = block.all_heads_norm and layout.itemsize < FP32
        if block.qk_norm and not has_copies:
            return kept + qkv  # the norms' inputs
        if block.rotary:
            return kept
        return kept + qkv - inner
    # v is a view of qkv, which is kept as a whole.
    rotated = inner + key_value if block.rotary else 0
    return qkv + inner + rotated


def _merged_attention(stack: StackSpec, batch: Batch, layout: Layout, *, without_core: bool) -> int:
    """Returns the bytes that attention to own tokens and to a source keeps."""
    block = stack.block
    e = layout.itemsize
    inner = block.heads * block.head_size
    key_value = block.key_value_size
    queries = _own_length(stack, batch)
    keys = queries + batch.length
    projected = batch.size * keys  # the tokens of which there are queries, keys and values
    # What is projected, the statistics of the source's keys, the rotated queries, and the output.
    total = projected * (inner + 2 * key_value) * e
    total += batch.size * batch.length * key_value // block.head_size * FP32
    total += 2 * batch.size * queries * inner * e
    # All keys and values, with each head repeated where the weights are written.
    eager = not without_core and _materializes_weights(block, layout, queries, keys, crosses=False)
    total += 2 * projected * (inner if eager else key_value) * e
    in_blocks = _in_blocks(block, layout, queries, keys, crosses=False)
    if block.attention_dropout and (in_blocks or not without_core):
        total += batch.size * INT64
    if in_blocks:
        return total + batch.size * block.heads * queries * FP32
    if without_core:
        return total
    if eager:
        kept = 2 if block.attention_dropout else 1
        return total + batch.size * block.heads * queries * keys * e * kept
    masks = batch.size if batch.padded else 1
    return total + batch.size * block.heads * queries * FP32 + masks * queries * keys * e


def _latent_attention(
    stack: StackSpec, batch: Batch, layout: Layout, sizes: LatentSizes, *, without_core: bool
) -> int:
    """Returns the bytes that latent attention keeps of latent vectors, queries, keys and values, and
    of its output.
    """
    block = stack.block
    e = layout.itemsize
    tokens = _tokens(stack, batch)
    # The input and the output of each norm of latent vectors, and its statistics.
    latent = 2 * sizes.rank + sizes.rope
    projected = sizes.rank + sizes.rope
    norms = 1
    if sizes.query_rank:
        latent += 2 * sizes.query_rank
        projected += sizes.query_rank
        norms += 1
    total = tokens * (latent * e + norms * FP32) // layout.sequence_split
    if layout.sequence_split > 1:
        # The weights of replicated projections are put together for their all-reduce.
        total += projected * block.hidden * e
    # Queries and keys are put together, and padded if values are larger.
    features = 2 * sizes.head_size
    length = _own_length(stack, batch)
    eager = not without_core and _materializes_weights(block, layout, length, length, crosses=False)
    if sizes.value < sizes.head_size:
        # Padded values, and the output without the padding.
        features += sizes.head_size + sizes.value
        if not eager and not without_core:
            features += sizes.head_size
    elif eager:
        features += 2 * sizes.value
    else:
        # Values are a view of what the latent vector is projected to.
        features += sizes.nope + 2 * sizes.value
    return total + tokens * block.heads * features * e


def _local_attention(stack: StackSpec, batch: Batch, layout: Layout, *, without_core: bool) -> int:
    """Returns the bytes that local attention keeps of queries, keys and values, of its weights and
    of its output.
    """
    block = stack.block
    e = layout.itemsize
    inner = block.heads * block.head_size
    tokens = _tokens(stack, batch)
    rows, keys = _count_local_keys(block, batch)
    queries = batch.size * rows * block.block_length
    total = tokens * inner * e  # the output
    sums = 0
    if block.summed:
        sums = batch.size * (keys - 3 * block.block_length)
        # The input, the output and the statistics of the norm of the sums.
        total += sums * (2 * block.hidden * e + block.statistics * FP32) // layout.sequence_split
    if without_core:  # queries, keys and values as they are projected
        return total + (3 * tokens + 3 * sums) * inner * e
    # Each block has its own copy of the keys and values that its queries see.
    total += (queries + 2 * batch.size * rows * keys) * inner * e
    weights = queries * block.heads * keys * e
    if suits_tiles(block.block_length, keys, layout.device, e) and not block.summed:
        return total + queries * block.heads * FP32
    total += weights * (2 if block.attention_dropout else 1)
    if block.attention_dropout:
        total += batch.size * rows * INT64
    return total


def _count_local_keys(block: BlockSpec, batch: Batch) -> tuple[int, int]:
    """Returns the number of blocks of a sequence, and of the keys that a query of one sees."""
    keys = 3 * block.block_length
    if block.summed:
        keys += max(batch.length // block.summed, 1)
    return -(-batch.length // block.block_length), keys


def _own_length(stack: StackSpec, batch: Batch) -> int:
    return batch.target_length if stack.is_decoder else batch.length


def _core(
    stack: StackSpec, batch: Batch, layout: Layout, keys: int, *, crosses: bool, recomputed: bool
) -> int:
    """Returns the bytes that attention keeps besides queries, keys, values and its output."""
    block = stack.block
    queries = _own_length(stack, batch)
    log_sums = batch.size * block.heads * queries * FP32
    if _in_blocks(block, layout, queries, keys, crosses):
        return log_sums
    if recomputed:
        return 0
    weights = batch.size * block.heads * queries * keys * layout.itemsize
    if _materializes_weights(block, layout, queries, keys, crosses):
        kept = 2 if block.attention_dropout else 1
        return weights * (kept + block.capped)  # the hyperbolic tangents of the scores
    windowed = block.window is not None and keys > block.window + 1
    # A decoder's own attention needs no mask for padding: a target's padding is behind its tokens.
    padded = batch.padded and (crosses or not stack.is_decoder)
    if not (padded or windowed):
        return log_sums
    rows = queries if windowed or (block.causal and not crosses) else 1
    masks = batch.size if padded else 1
    return log_sums + masks * rows * keys * layout.itemsize  # the additive mask


def _materializes_weights(
    block: BlockSpec, layout: Layout, queries: int, keys: int, crosses: bool
) -> bool:
    """Returns whether attention writes its weights to memory, instead of running a fused kernel."""
    if _in_blocks(block, layout, queries, keys, crosses):
        return False
    if block.attention_dropout or (block.bias and not crosses) or block.capped:
        return True
    return writes_scores(queries, keys, layout.device, layout.itemsize)


def _in_blocks(block: BlockSpec, layout: Layout, queries: int, keys: int, crosses: bool) -> bool:
    """Returns whether attention computes a tile or block of the scores at a time and keeps none of
    its weights.
    """
    if block.sinks:
        return True
    if block.position_terms:
        return False
    has_rules = block.attention_dropout or (block.bias and not crosses) or block.capped
    needed = has_rules or layout.device == "cpu"
    return needed and suits_tiles(queries, keys, layout.device, layout.itemsize)


def _working(stack: StackSpec, batch: Batch, layout: Layout, recomputed: int = 0) -> int:
    """Returns the bytes that a block's backward pass needs beyond what the block kept.

    These are two gradients of the residual stream, and the larger of the gradients inside the
    feed-forward block and those inside attention, which exist after the feed-forward block's
    tensors are freed. Recomputing the core of attention adds `recomputed` bytes to the latter.
    """
    block = stack.block
    e = layout.itemsize
    tokens = _tokens(stack, batch)
    wide = tokens * block.feed_forward * e
    inner = tokens * block.heads * block.head_size * e
    length = _own_length(stack, batch)
    attention = 4 * inner
    if block.block_length:
        rows, keys = _count_local_keys(block, batch)
        features = rows * (block.block_length + 2 * keys) * block.head_size
        scores = rows * block.block_length * keys
        attention += batch.size * block.heads * (scores + features) * e
    elif _materializes_weights(block, layout, length, length, crosses=False):
        # While the gradient of the weights exists, the only others are those of the output and of
        # the values.
        attention = max(batch.size * block.heads * length**2 * e + 2 * inner, attention)
    elif _in_blocks(block, layout, length, length, crosses=False):
        heads = batch.size * block.heads
        if has_attention_kernel(layout.device, e) and not block.capped:
            if block.bias:  # Each sample has its gradient of the bias.
                attention += heads * (2 * length - 1) * FP32
        else:
            # Six tensors of a block's scores, and the sums of the gradients of k and v in fp32.
            scores = (
                heads * min(choose_block_rows(heads * length * e, layout.device), length) * length
            )
            attention += 6 * scores * e + 2 * inner // e * FP32
    # By then the feed-forward block's kept tensors, its norm's input and output included, are
    # freed.
    attention += recomputed - block.mlp_kept * wide - 2 * _stream(stack, batch, layout)
    return 2 * tokens * block.hidden * e + max(wide * (2 if block.gated else 1), attention)
