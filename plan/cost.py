"""Predicts the time of a training step: products, memory traffic, collectives, launches, bubble.

A product of m x k by k x n takes 2mnk FLOPs at a fraction of the device's peak, plus its operands'
bytes at a fraction of the memory's bandwidth. The sum of both is what makes small and thin products
slow. All else of a block is memory traffic. A stage needs at least the time that the host takes to
launch its kernels.

Collectives are rings: an all-reduce of B bytes over r ranks sends 2 (r - 1) / r B bytes in
2 (r - 1) messages (Thakur et al. 2005, section 4). A pipeline takes M micro-batches of its slowest
stage and one of each other stage, the latter divided by the groups of layers on a rank (Narayanan
et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ..models.activations import Activations, BlockSpec, StackSpec
from ..models.parallel_config import WHOLE_BLOCKS, Recompute
from .hardware import Cluster, Link, Rates

FP32 = 4  # bytes


@dataclass(frozen=True)
class Network:
    """A model as its stacks of equal blocks, the rows of its vocabulary and its parameters, of which
    `in_experts` are in the experts of mixtures.
    """

    stacks: tuple[StackSpec, ...]
    vocabulary: int
    parameters: int
    in_experts: int = 0

    @classmethod
    def from_activations(
        cls, activations: Activations, vocabulary: int, parameters: int, in_experts: int = 0
    ) -> Network:
        """Returns the network that a family's `activations` describe."""
        return cls(activations.stacks, vocabulary, parameters, in_experts)

    @property
    def layers(self) -> int:
        return sum(stack.layers for stack in self.stacks)

    @property
    def hidden(self) -> int:
        return self.stacks[0].block.hidden


@dataclass(frozen=True)
class PlannedRun:
    """A layout and a batch.

    Attributes:
        gpus: Devices; data-parallel size times `tensor` times `pipeline` times `context`.
        global_batch, micro_batch: Sequences.
        length, target_length: Tokens of a sequence; 0 for a target as long as its source.
        tensor, pipeline: Tensor-parallel size and number of pipeline stages.
        context: Context-parallel size: the ranks that share each sequence.
        expert: Expert-parallel size: the data-parallel ranks that share the experts of mixtures.
        chunks: Groups of layers on a pipeline rank, of an interleaved schedule.
        fused_attention: Whether scores stay in the device's caches (Dao et al. 2022,
            arXiv:2205.14135).
        zero_stage: 1 and more split the update over the data-parallel ranks; 3 gathers the weights
            in each pass.
        fsdp: Whether torch's FSDP2 does what stage 3 does; it adds up gradients in fp32.
        itemsize: Bytes of an element of weights and activations.
        gradient_itemsize: Bytes of an element of the gradients that are reduced.
    """

    gpus: int
    global_batch: int
    micro_batch: int = 1
    length: int = 1024
    target_length: int = 0
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    fused_attention: bool = True
    zero_stage: int = 1
    fsdp: bool = False
    itemsize: int = 2
    gradient_itemsize: int = 2
    context: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """Returns the data-parallel size; the expert-parallel ranks are among them."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def replicas(self) -> int:
        """Returns the number of ranks that hold the same parameters, experts that are dealt over ranks
        excepted.
        """
        return self.data * self.context

    def split(self, parameters: float, in_experts: float) -> tuple[float, float]:
        """Returns the numbers of a rank's parameters outside of experts, and in them."""
        ranks = self.tensor * self.pipeline
        return (parameters - in_experts) / ranks, in_experts / (ranks * self.expert)

    @property
    def micro_batches(self) -> int:
        """Returns the micro-batches of each replica in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def passes(self) -> int:
        """Returns how often a micro-batch goes through a block: forward, backward, recomputation."""
        return 3 if self.recompute in WHOLE_BLOCKS else 2

    @property
    def exchanges_each_pass(self) -> bool:
        """Returns whether replicas exchange weights or gradients in each micro-batch."""
        return self.fsdp or self.zero_stage > 1

    def tokens(self, stack: StackSpec) -> int:
        """Returns the tokens of one sequence in a stack."""
        if stack.is_decoder and self.target_length:
            return self.target_length
        return self.length

    def check(self) -> None:
        """Raises ValueError if the devices or the batch cannot be divided so."""
        if self.gpus % (self.tensor * self.pipeline * self.context):
            sizes = f"{self.tensor} x {self.pipeline}"
            if self.context > 1:
                sizes += f" x {self.context}"
            raise ValueError(f"{self.gpus} devices are not a multiple of {sizes} of one replica")
        if self.data % self.expert:
            raise ValueError(
                f"{self.data} data-parallel ranks are not a multiple of {self.expert} expert-parallel ones"
            )
        if self.global_batch % (self.micro_batch * self.data):
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch "
                f"{self.micro_batch} x {self.data} data-parallel ranks"
            )


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by what they are spent on, `parts`, which add up to `total`."""

    products: float
    memory: float
    launches: float
    tensor_parallel: float
    pipeline_messages: float
    bubble: float
    gradients: float
    update: float
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    flops: float = field(default=0.0)
    """FLOPs of the model in a step of all devices, without what is recomputed."""

    @property
    def parts(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "flops"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PassCost:
    """What a pass of one micro-batch through some blocks computes and moves.

    Attributes:
        flops: FLOPs of matrix products.
        operands: Bytes of the products' operands and results.
        traffic: Bytes that elementwise kernels read and write.
        kernels: Kernels that are launched.
        fused: FLOPs of fused attention, a third of those of both passes: the backward pass computes
            the scores again, so it has five products where the forward pass has two (Dao et al.
            2022, algorithm 4).
        masked: Elements to which a dropout mask is applied.
    """

    flops: float = 0.0
    operands: float = 0.0
    traffic: float = 0.0
    kernels: float = 0.0
    fused: float = 0.0
    masked: float = 0.0

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, factor: float) -> PassCost:
        return PassCost(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class StageTime:
    """The seconds of a micro-batch's two passes through a pipeline stage.

    Attributes:
        busy: Products, memory traffic and waiting for launches.
        tensor_parallel: All-reduces of the tensor-parallel ranks.
        forward: The forward pass's share of `busy`, and of both kinds of collectives.
        context_parallel: Exchanges of the context-parallel ranks.
        expert_parallel: All-to-alls of the expert-parallel ranks.
    """

    busy: tuple[float, float, float]
    tensor_parallel: float
    forward: tuple[float, float]
    context_parallel: float = 0.0
    expert_parallel: float = 0.0

    @property
    def exchanges(self) -> float:
        """All collectives together."""
        return self.tensor_parallel + self.context_parallel + self.expert_parallel

    @property
    def total(self) -> float:
        return sum(self.busy) + self.exchanges


# --- A step ---------------------------------------------------------------------------------------


def step_time(network: Network, run: PlannedRun, cluster: Cluster) -> StepTime:
    """Predicts the time of an optimizer step.

    Raises:
        ValueError: The devices or the batch cannot be divided so.
    """
    run.check()
    stages = stage_times(network, run, cluster)
    slowest = max(stages, key=lambda stage: stage.total)
    messages = message_time(network, run, cluster)
    # The pipeline fills and drains: each other stage, and each hop, is waited for once.
    other_stages = sum(stage.total for stage in stages) - slowest.total
    bubble = (other_stages + (run.pipeline - 1) * messages) / run.chunks
    products, memory, launches = (part * run.micro_batches for part in slowest.busy)
    # Of a forward pass and a backward pass, which takes twice as long. What is recomputed is
    # counted with it; it is done before the last gradients exist.
    last_backward = 2 / 3 * sum(slowest.busy)
    return StepTime(
        products=products,
        memory=memory,
        launches=launches + cluster.rates.step,
        tensor_parallel=slowest.tensor_parallel * run.micro_batches,
        pipeline_messages=messages * run.micro_batches,
        bubble=bubble,
        gradients=gradient_time(network, run, cluster, last_backward),
        update=update_time(network, run, cluster),
        context_parallel=slowest.context_parallel * run.micro_batches,
        expert_parallel=slowest.expert_parallel * run.micro_batches,
        flops=model_flops(network, run),
    )


def stage_times(network: Network, run: PlannedRun, cluster: Cluster) -> list[StageTime]:
    """Returns the time of each pipeline stage.

    Blocks are given to the stages evenly, in their order; the last stage has the head too.
    """
    all_reduces = [
        tensor_parallel_time(stack, run, network.hidden, cluster) for stack in network.stacks
    ]
    exchanges = [context_parallel_time(stack, run, cluster) for stack in network.stacks]
    all_to_alls = [expert_parallel_time(stack, run, cluster) for stack in network.stacks]
    shapes: list[tuple[tuple[int, ...], bool]] = []
    for stage, counts in enumerate(_blocks_per_stage(network, run.pipeline)):
        shapes.append((counts, stage == run.pipeline - 1))
    # Most stages are alike, so each kind is computed once.
    times: dict[tuple[tuple[int, ...], bool], StageTime] = {}
    for counts, is_last in dict.fromkeys(shapes):
        forward, all_passes = stage_work(network, run, counts, is_last)
        busy = seconds(all_passes, run, cluster)
        tensor = sum(ring * count for ring, count in zip(all_reduces, counts, strict=True))
        forward_share = sum(seconds(forward, run, cluster)) / (sum(busy) or 1.0)
        context = sum(time * count for time, count in zip(exchanges, counts, strict=True))
        expert = sum(time * count for time, count in zip(all_to_alls, counts, strict=True))
        shares = (forward_share, 1 / run.passes)
        times[counts, is_last] = StageTime(busy, tensor, shares, context, expert)
    return [times[shape] for shape in shapes]


def stage_work(
    network: Network, run: PlannedRun, counts: tuple[int, ...], is_last: bool
) -> tuple[PassCost, PassCost]:
    """Returns what a stage's forward pass costs, and what all its passes cost together.

    Args:
        counts: How many blocks of each stack the stage holds.
        is_last: Whether the stage has the head.
    """
    forward = PassCost()
    all_passes = PassCost()
    for (_, block, attention), count in zip(_block_costs(network, run), counts, strict=True):
        recomputed = PassCost()
        if run.recompute == "selective":
            recomputed = attention
        elif run.recompute in WHOLE_BLOCKS:
            # Inputs that go to the host do so while blocks compute.
            recomputed = block
        forward = forward + block * count
        # A backward pass has two products for each one of the forward pass.
        all_passes = all_passes + (block * 3.0 + recomputed) * count
    if is_last:
        head = head_cost(network, run)
        forward = forward + head
        all_passes = all_passes + head * 3.0
    return forward, all_passes


def _blocks_per_stage(network: Network, stages: int) -> Iterator[tuple[int, ...]]:
    """Yields how many blocks of each stack a stage holds; the numbers of the stages differ by
    one at most.
    """
    ends = [0, *accumulate(stack.layers for stack in network.stacks)]
    for stage in range(stages):
        first = network.layers * stage // stages
        end = network.layers * (stage + 1) // stages
        yield tuple(
            max(min(end, stack_end) - max(first, stack_start), 0)
            for stack_start, stack_end in pairwise(ends)
        )


def seconds(work: PassCost, run: PlannedRun, cluster: Cluster) -> tuple[float, float, float]:
    """Returns the seconds of products, of memory traffic, and of launches that the device waits
    for.
    """
    device = cluster.device
    rates = cluster.rates
    bandwidth = device.bandwidth * rates.memory
    peak = device.peak_flops(run.itemsize) * device.sustained
    products = work.flops / (peak * rates.compute) + work.fused / (peak * rates.attention)
    products += work.operands / bandwidth
    memory = work.traffic / bandwidth + work.masked * rates.dropout
    launches = work.kernels * rates.launch
    if rates.asynchronous:  # The host launches further kernels while the device computes.
        launches = max(launches - products - memory, 0.0)
    return products, memory, launches


# --- What a pass computes and moves ---------------------------------------------------------------


def matmul_cost(m: float, k: float, n: float, itemsize: int, count: float = 1.0) -> PassCost:
    """Returns the cost of a product of m x k by k x n, `count` times in one kernel."""
    return PassCost(2 * m * k * n * count, itemsize * (m * k + k * n + m * n) * count, 0.0, 1.0)


def block_cost(block: BlockSpec, run: PlannedRun, tokens: int, source: int) -> PassCost:
    """Returns the forward pass of a micro-batch through one block, on the busiest rank.

    Args:
        tokens: Of a sequence in this block's stack.
        source: Tokens to which cross-attention attends.
    """
    part = block.on_rank(run.tensor)
    itemsize = run.itemsize
    rows = float(run.micro_batch * tokens) / run.context
    hidden = block.hidden
    inner = part.heads * block.head_size
    products = [
        matmul_cost(rows, hidden, inner + 2 * part.key_value_size, itemsize),
        matmul_cost(rows, inner, hidden, itemsize),
    ]
    if block.cross:
        source_rows = float(run.micro_batch * source) / run.context
        products += [
            matmul_cost(rows, hidden, inner, itemsize),
            matmul_cost(source_rows, hidden, 2 * part.key_value_size, itemsize),
            matmul_cost(rows, inner, hidden, itemsize),
        ]
    products += [
        matmul_cost(rows, hidden, part.feed_forward * (1 + block.gated), itemsize),
        matmul_cost(rows, part.feed_forward, hidden, itemsize),
    ]
    # Norm, dropout and residual of both halves read or write the stream 5 times each; the
    # activation function with its bias reads and writes the inner features; the heads are
    # rearranged once.
    split = run.tensor if run.sequence_parallel else 1
    stream = 2 * 5 * rows * hidden / split
    inside = (2 + block.gated) * rows * part.feed_forward
    inside += 2 * rows * (inner + 2 * part.key_value_size)
    elementwise = PassCost(
        traffic=itemsize * (stream + inside),
        kernels=10 + 3 * block.cross,
        masked=block.dropouts * rows * hidden / split,
    )
    return sum(products, elementwise) + attention_cost(part, run, tokens, source)


def attention_cost(part: BlockSpec, run: PlannedRun, tokens: int, source: int) -> PassCost:
    """Returns scores, softmax and weighted sum of one block, of self- and cross-attention."""
    total = PassCost()
    key_lengths = (tokens, source) if part.cross else (tokens,)
    for keys in key_lengths:
        # Context-parallel ranks have a part of the heads each, or of the queries.
        heads = run.micro_batch * part.heads / run.context
        size = part.head_size
        scores = heads * tokens * keys
        masked = float(scores) if part.attention_dropout else 0.0
        if run.fused_attention:
            # A causal mask skips half of the blocks of scores.
            seen = 0.5 if part.causal and keys == tokens else 1.0
            total += PassCost(
                operands=run.itemsize * heads * size * 2 * (tokens + keys),
                kernels=1.0,
                fused=(2 + 5) / 3 * 2 * scores * size * seen,
                masked=masked * seen,
            )
        else:
            products = matmul_cost(tokens, size, keys, run.itemsize, heads)
            products = products + matmul_cost(tokens, keys, size, run.itemsize, heads)
            # Dropout reads and writes the scores, and its mask's byte twice: three accesses of 16
            # bits.
            dropout_accesses = 3 if part.attention_dropout else 0
            total += products + PassCost(
                traffic=run.itemsize * scores * (2 + dropout_accesses), kernels=2, masked=masked
            )
    return total


def head_cost(network: Network, run: PlannedRun) -> PassCost:
    """Returns the logits and their loss, which reads and writes them in fp32 about three times."""
    tokens = run.micro_batch * run.tokens(network.stacks[-1]) / run.context
    rows = -(-network.vocabulary // run.tensor)
    loss = PassCost(traffic=3 * 4 * tokens * rows, kernels=10)
    return matmul_cost(tokens, network.hidden, rows, run.itemsize) + loss


def _block_costs(
    network: Network, run: PlannedRun
) -> Iterator[tuple[StackSpec, PassCost, PassCost]]:
    """Yields each stack with the cost of one of its blocks, and of that block's attention."""
    for stack in network.stacks:
        tokens = run.tokens(stack)
        source = run.length
        part = stack.block.on_rank(run.tensor)
        whole = block_cost(stack.block, run, tokens, source)
        yield stack, whole, attention_cost(part, run, tokens, source)


# --- Collectives and the update -------------------------------------------------------------------


def ring_all_reduce(size: float, ranks: int, link: Link, rates: Rates) -> float:
    """Returns the seconds of an all-reduce of `size` bytes over a ring."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (size / ranks / (link.bandwidth * rates.link) + link.latency)


def tensor_parallel_time(stack: StackSpec, run: PlannedRun, hidden: int, cluster: Cluster) -> float:
    """Returns the seconds of a block's all-reduces in a micro-batch: one after each part and pass.

    Sequence parallelism replaces an all-reduce by a reduce-scatter and an all-gather of the same
    bytes.
    """
    size = run.micro_batch * run.tokens(stack) / run.context * hidden * run.itemsize
    link = cluster.link(run.tensor, 1)
    all_reduces = run.passes * (2 + stack.block.cross)
    return all_reduces * ring_all_reduce(size, run.tensor, link, cluster.rates)


def context_parallel_time(stack: StackSpec, run: PlannedRun, cluster: Cluster) -> float:
    """Returns the seconds of the exchanges of a block's attention in a micro-batch.

    Heads are exchanged where the ranks divide them, and keys and values otherwise; see
    docs/long-context.md for the formulas. Whatever is recomputed is exchanged again.
    """
    ranks = run.context
    if ranks == 1:
        return 0.0
    part = stack.block.on_rank(run.tensor)
    link = cluster.link(ranks, run.tensor)
    passes = 2 if run.recompute == "none" else 3
    tokens = run.tokens(stack)
    total = 0.0
    for keys in (tokens, run.length) if part.cross else (tokens,):
        queries_size = part.heads * part.head_size * tokens / ranks
        keys_size = part.key_value_size * keys / ranks
        if part.heads % ranks == 0:
            elements = (2 * queries_size + 2 * keys_size) * (ranks - 1) / ranks
            messages = 4
        else:
            elements = 2 * keys_size * (ranks - 1)
            messages = 2
        size = run.micro_batch * elements * run.itemsize
        latency = messages * (ranks - 1) * link.latency
        total += size / (link.bandwidth * cluster.rates.link) + latency
    return passes * total


def expert_parallel_bytes(stack: StackSpec, run: PlannedRun) -> float:
    """Returns the bytes that a rank sends in the all-to-alls of a block's mixture in a micro-batch, if
    all experts are equally popular; see docs/experts.md.

    Each of a token's experts that is elsewhere takes its hidden state there and back, in each pass.
    """
    block = stack.block
    tokens = run.micro_batch * run.tokens(stack) / run.context
    elsewhere = (run.expert - 1) / run.expert
    return 2 * run.passes * tokens * block.routed * elsewhere * block.hidden * run.itemsize


def expert_parallel_time(stack: StackSpec, run: PlannedRun, cluster: Cluster) -> float:
    """Returns the seconds of a block's all-to-alls in a micro-batch, and of the all-gather of the
    numbers of tokens before them.
    """
    if run.expert == 1 or not stack.block.routed:
        return 0.0
    link = cluster.link(run.expert, run.tensor)
    forward_passes = run.passes - 1
    messages = (2 * run.passes + forward_passes) * (run.expert - 1)
    size = expert_parallel_bytes(stack, run)
    return size / (link.bandwidth * cluster.rates.link) + messages * link.latency


def message_time(network: Network, run: PlannedRun, cluster: Cluster) -> float:
    """Returns the seconds in which a stage waits for a micro-batch's messages.

    There is one in each direction for each group of layers.
    """
    if run.pipeline == 1:
        return 0.0
    link = cluster.link(run.pipeline, run.tensor * run.replicas)
    size = run.micro_batch * run.length / run.context * network.hidden * run.itemsize
    one = size / run.tensor / (link.bandwidth * cluster.rates.link) + link.latency
    return 2 * run.chunks * one


def gradient_time(network: Network, run: PlannedRun, cluster: Cluster, backward: float) -> float:
    """Returns the seconds of the gradients' reduction that the backward pass does not hide.

    Args:
        backward: Seconds of one micro-batch's backward pass.
    """
    all_reduce, rounds = gradient_ring(network, run, cluster)
    if run.exchanges_each_pass:  # Gradients are reduced behind each micro-batch, not only the last.
        backward *= run.micro_batches
    return max(all_reduce * rounds - cluster.rates.overlap * backward, 0.0)


def gradient_ring(network: Network, run: PlannedRun, cluster: Cluster) -> tuple[float, float]:
    """Returns the seconds of an all-reduce of a rank's gradients, and how many a step needs."""
    others, experts = run.split(network.parameters, network.in_experts)
    rounds = 1.0
    if run.zero_stage == 2:
        # The gradients of each micro-batch are scattered and the weights gathered once; each is
        # half of an all-reduce.
        rounds = (run.micro_batches + 1) / 2
    elif run.zero_stage == 3 or run.fsdp:
        # The weights are also gathered for both passes of each micro-batch (Rajbhandari et al.
        # 2020, section 7).
        rounds = 1.5 * run.micro_batches
    seconds = 0.0
    # Fewer ranks hold the same experts.
    parts = (
        (others, run.replicas, run.tensor),
        (experts, run.replicas // run.expert, run.tensor * run.expert),
    )
    if run.expert == 1:
        parts = ((others + experts, run.replicas, run.tensor),)
    for elements, ranks, stride in parts:
        link = cluster.link(ranks, stride)
        gathered = ring_all_reduce(elements * run.gradient_itemsize, ranks, link, cluster.rates)
        if run.fsdp:
            # Two of the three halves have the weights' precision, and the third one is in fp32.
            scattered = ring_all_reduce(elements * FP32, ranks, link, cluster.rates)
            gathered = (2 * gathered + scattered) / 3
        seconds += gathered
    return seconds, rounds


def update_time(network: Network, run: PlannedRun, cluster: Cluster) -> float:
    """Returns the seconds of clipping and AdamW."""
    return update_bytes(network, run) / (cluster.device.bandwidth * cluster.rates.update)


def update_bytes(network: Network, run: PlannedRun) -> float:
    """Returns the bytes that a rank's clipping and AdamW read and write.

    Per element: 4 bytes to read for the norm; the update reads gradient, weight and two moments of
    4 bytes, and writes the last three and a weight of `itemsize` bytes.
    """
    others, experts = run.split(network.parameters, network.in_experts)
    own = others + experts
    if run.zero_stage or run.fsdp:
        own = (others + experts * run.expert) / run.replicas
    # FSDP rounds the weights when it sends them.
    rounded = 0 if run.fsdp else run.itemsize
    return own * (4 + 28 + rounded)


def model_flops(network: Network, run: PlannedRun) -> float:
    """Returns the FLOPs of a step of all devices, three times those of the forward pass.

    Scores count whole, as in MFU.
    """
    unsplit = PlannedRun(
        gpus=1,
        global_batch=run.global_batch,
        micro_batch=run.global_batch,
        length=run.length,
        target_length=run.target_length,
        fused_attention=False,
    )
    costs = _block_costs(network, unsplit)
    blocks = sum(stack.layers * block.flops for stack, block, _ in costs)
    return 3 * (blocks + head_cost(network, unsplit).flops)
