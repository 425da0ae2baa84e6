"""Predicts the time of a training step: matrix products, memory traffic, collectives, launches, pipeline bubble.

A product of m x k by k x n takes 2mnk FLOPs at a fraction of the device's peak, plus its operands' bytes at a fraction
of the memory's bandwidth. The sum of both is what makes small and thin products slower. All else of a block is memory
traffic. A stage needs at least the time that the host takes to launch its kernels.

Collectives are rings: an all-reduce of B bytes over r ranks sends 2 (r - 1) / r B bytes in 2 (r - 1) messages
(Thakur et al. 2005, section 4). A pipeline takes M micro-batches of its slowest stage and one of each other stage, the
latter divided by the groups of layers on a rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal

from ..models.activations import Activations, Block, Stack
from .hardware import Cluster, Link, Rates

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Network:
    """A model as its stacks of equal blocks, the rows of its vocabulary and the number of its parameters."""

    stacks: tuple[Stack, ...]
    vocabulary: int
    parameters: int

    @property
    def layers(self) -> int:
        return sum(stack.layers for stack in self.stacks)

    @property
    def hidden(self) -> int:
        return self.stacks[0].block.hidden


def network_of(activations: Activations, vocabulary: int, parameters: int) -> Network:
    """Returns the network that a family's `activations` describe."""
    return Network(activations.stacks, vocabulary, parameters)


@dataclass(frozen=True)
class Run:
    """A layout and a batch.

    Attributes:
        gpus: Devices; data-parallel size times `tensor` times `pipeline`.
        chunks: Groups of layers on a pipeline rank, of an interleaved schedule.
        fused_attention: Whether scores stay in the device's caches (Dao et al. 2022, arXiv:2205.14135).
        gradient_itemsize: Bytes of an element of the gradients that are reduced.
        zero_stage: 1 and more split the update over the data-parallel ranks; 3 gathers the weights in each pass.
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
    itemsize: int = 2
    gradient_itemsize: int = 2

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    def tokens(self, stack: Stack) -> int:
        """Returns the tokens of a micro-batch in a sequence of the stack's."""
        return (self.target_length or self.length) if stack.is_decoder else self.length


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by what they are spent on; they add up to `total`."""

    products: float
    memory: float
    launches: float
    tensor_parallel: float
    pipeline_messages: float
    bubble: float
    gradients: float
    update: float
    flops: float = field(default=0.0)
    """FLOPs of the model in a step of all devices, without what is recomputed."""

    @property
    def parts(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "flops"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Pass:
    """The forward pass of one micro-batch through some blocks: FLOPs and bytes of products, other bytes, kernels.

    `masked` are elements to which a dropout mask is applied. `fused` are the FLOPs of fused attention, a third of those
    of both passes: the backward pass computes the scores again, so it has five products where the forward pass has two
    (Dao et al. 2022, algorithm 4).
    """

    flops: float = 0.0
    operands: float = 0.0
    traffic: float = 0.0
    kernels: float = 0.0
    fused: float = 0.0
    masked: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, factor: float) -> Pass:
        return Pass(*(factor * value for value in vars(self).values()))


def ring_all_reduce(size: float, ranks: int, link: Link, rates: Rates) -> float:
    """Returns the seconds of an all-reduce of `size` bytes over a ring."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (size / ranks / (link.bandwidth * rates.link) + link.latency)


def matmul(m: float, k: float, n: float, itemsize: int, count: float = 1.0) -> Pass:
    """Returns a product of m x k by k x n, `count` times."""
    return Pass(2 * m * k * n * count, itemsize * (m * k + k * n + m * n) * count, 0.0, 1.0)


def block_pass(block: Block, run: Run, tokens: int, source: int) -> Pass:
    """Returns the forward pass of a micro-batch through one block, on the busiest tensor-parallel rank."""
    part, e = block.on_rank(run.tensor), run.itemsize
    m, h = float(run.micro_batch * tokens), block.hidden
    inner = part.heads * block.head_size
    linear = [matmul(m, h, inner + 2 * part.key_value_size, e), matmul(m, inner, h, e)]
    if block.cross:
        memory = float(run.micro_batch * source)
        linear += [
            matmul(m, h, inner, e),
            matmul(memory, h, 2 * part.key_value_size, e),
            matmul(m, inner, h, e),
        ]
    linear += [
        matmul(m, h, part.feed_forward * (1 + block.gated), e),
        matmul(m, part.feed_forward, h, e),
    ]
    # Norm, dropout and residual of both halves read or write the stream 5 times each; the activation function with its
    # bias reads and writes the inner features; the heads are rearranged once.
    stream = 2 * 5 * m * h / (run.tensor if run.sequence_parallel else 1)
    inside = (2 + block.gated) * m * part.feed_forward + 2 * m * (inner + 2 * part.key_value_size)
    masked = block.dropouts * m * h / (run.tensor if run.sequence_parallel else 1)
    elementwise = Pass(traffic=e * (stream + inside), kernels=10 + 3 * block.cross, masked=masked)
    return sum(linear, elementwise) + attention_pass(part, run, tokens, source)


def attention_pass(part: Block, run: Run, tokens: int, source: int) -> Pass:
    """Returns scores, softmax and weighted sum of one block, of self-attention and cross-attention."""
    found = Pass()
    for keys in (tokens, source) if part.cross else (tokens,):
        heads, d = run.micro_batch * part.heads, part.head_size
        scores = heads * tokens * keys
        masked = float(scores) if part.attention_dropout else 0.0
        if run.fused_attention:
            moved = run.itemsize * heads * d * 2 * (tokens + keys)
            # A causal mask skips half of the blocks of scores.
            seen = 0.5 if part.causal and keys == tokens else 1.0
            found += Pass(
                operands=moved,
                kernels=1.0,
                fused=(2 + 5) / 3 * 2 * scores * d * seen,
                masked=masked * seen,
            )
        else:
            products = matmul(tokens, d, keys, run.itemsize, heads) + matmul(
                tokens, keys, d, run.itemsize, heads
            )
            dropped = 3 if part.attention_dropout else 0  # reads, writes, and the mask's byte twice
            found += products + Pass(
                traffic=run.itemsize * scores * (2 + dropped), kernels=2, masked=masked
            )
    return found


def _stacks(network: Network, run: Run) -> Iterator[tuple[Stack, Pass, Pass]]:
    """Yields each stack with the passes of one of its blocks: all of it, and its attention."""
    for stack in network.stacks:
        tokens, source = run.tokens(stack), run.length
        part = stack.block.on_rank(run.tensor)
        yield (
            stack,
            block_pass(stack.block, run, tokens, source),
            attention_pass(part, run, tokens, source),
        )


def step_time(network: Network, run: Run, cluster: Cluster) -> StepTime:
    """Predicts the time of an optimizer step. ValueError if the devices or the batch cannot be divided so."""
    _check(run)
    stages = stage_times(network, run, cluster)
    slowest = max(stages, key=lambda stage: stage.total)
    messages = message_time(network, run, cluster)
    others = sum(stage.total for stage in stages) - slowest.total + (run.pipeline - 1) * messages
    count = run.micro_batches
    products, memory, launches = (part * count for part in slowest.busy)
    return StepTime(
        products,
        memory,
        launches + cluster.rates.step,
        tensor_parallel=slowest.tensor_parallel * count,
        pipeline_messages=messages * count,
        bubble=others / run.chunks,
        gradients=gradient_time(network, run, cluster, 2 / 3 * sum(slowest.busy)),
        update=update_time(network, run, cluster),
        flops=model_flops(network, run),
    )


@dataclass(frozen=True)
class StageTime:
    """The seconds of a micro-batch's two passes through a pipeline stage.

    Attributes:
        busy: Products, memory traffic and waiting for launches.
        tensor_parallel: All-reduces of the tensor-parallel ranks.
        forward: The forward pass's share of `busy` and of `tensor_parallel`.
    """

    busy: tuple[float, float, float]
    tensor_parallel: float
    forward: tuple[float, float]

    @property
    def total(self) -> float:
        return sum(self.busy) + self.tensor_parallel


def stage_times(network: Network, run: Run, cluster: Cluster) -> list[StageTime]:
    """Returns the time of each pipeline stage. Blocks are dealt evenly in their order; the last stage has the head."""
    found = dict[tuple[tuple[int, ...], bool], StageTime]()
    rings = [tensor_parallel_time(stack, run, network.hidden, cluster) for stack in network.stacks]
    deal = [
        (counts, stage == run.pipeline - 1)
        for stage, counts in enumerate(_dealt(network, run.pipeline))
    ]
    for counts, is_last in dict.fromkeys(deal):
        once, every = stage_work(network, run, counts, is_last)
        busy, tensor = seconds(every, run, cluster), sum(map(mul, rings, counts))
        forward = sum(seconds(once, run, cluster)) / (sum(busy) or 1.0), 1 / _passes(run)
        found[counts, is_last] = StageTime(busy, tensor, forward)
    return [found[stage] for stage in deal]


def stage_work(
    network: Network, run: Run, counts: tuple[int, ...], is_last: bool
) -> tuple[Pass, Pass]:
    """Returns the forward pass of a stage with so many blocks of each stack, and all its passes together."""
    once, every = Pass(), Pass()
    for (_, whole, attention), count in zip(_stacks(network, run), counts, strict=True):
        again = {"none": Pass(), "selective": attention, "full": whole}[run.recompute]
        once, every = once + whole * count, every + (whole * 3.0 + again) * count
    if is_last:
        head = head_pass(network, run)
        once, every = once + head, every + head * 3.0
    return once, every


def _dealt(network: Network, stages: int) -> Iterator[tuple[int, ...]]:
    """Yields how many blocks of each stack a stage holds. If they do not divide, the last stages hold one more."""
    ends = [0, *accumulate(stack.layers for stack in network.stacks)]
    for stage in range(stages):
        first, end = (network.layers * place // stages for place in (stage, stage + 1))
        yield tuple(max(min(end, b) - max(first, a), 0) for a, b in pairwise(ends))


def _passes(run: Run) -> int:
    """Returns how often a micro-batch goes through a block: forward, backward, and again for recomputation."""
    return 3 if run.recompute == "full" else 2


def _check(run: Run) -> None:
    if run.gpus % (run.tensor * run.pipeline):
        raise ValueError(
            f"{run.gpus} devices are not a multiple of {run.tensor} x {run.pipeline} of one replica"
        )
    if run.global_batch % (run.micro_batch * run.data):
        raise ValueError(
            f"global_batch {run.global_batch} is not a multiple of micro_batch {run.micro_batch} x {run.data} "
            "data-parallel ranks"
        )


def seconds(work: Pass, run: Run, cluster: Cluster) -> tuple[float, float, float]:
    """Returns the seconds of products, of memory traffic, and of launches that the device waits for."""
    device, rates = cluster.device, cluster.rates
    bandwidth, peak = (
        device.bandwidth * rates.memory,
        device.peak_of(run.itemsize) * device.sustained,
    )
    products = work.flops / (peak * rates.compute) + work.fused / (peak * rates.attention)
    products += work.operands / bandwidth
    memory = work.traffic / bandwidth + work.masked * rates.dropout
    launches = work.kernels * rates.launch
    return (
        products,
        memory,
        max(launches - products - memory, 0.0) if rates.asynchronous else launches,
    )


def head_pass(network: Network, run: Run) -> Pass:
    """Returns the logits and their loss, which reads and writes them in fp32 about three times."""
    tokens = run.micro_batch * run.tokens(network.stacks[-1])
    rows = -(-network.vocabulary // run.tensor)
    return matmul(tokens, network.hidden, rows, run.itemsize) + Pass(
        traffic=3 * 4 * tokens * rows, kernels=10
    )


def tensor_parallel_time(stack: Stack, run: Run, hidden: int, cluster: Cluster) -> float:
    """Returns the seconds of a block's all-reduces in a micro-batch: one after each part, in each direction.

    Sequence parallelism replaces an all-reduce by a reduce-scatter and an all-gather of the same bytes.
    """
    size, link = (
        run.micro_batch * run.tokens(stack) * hidden * run.itemsize,
        cluster.link(run.tensor, 1),
    )
    return (
        _passes(run)
        * (2 + stack.block.cross)
        * ring_all_reduce(size, run.tensor, link, cluster.rates)
    )


def message_time(network: Network, run: Run, cluster: Cluster) -> float:
    """Returns the seconds in which a stage waits for a micro-batch's messages: one in each direction and chunk."""
    if run.pipeline == 1:
        return 0.0
    link = cluster.link(run.pipeline, run.tensor * run.data)
    size = run.micro_batch * run.length * network.hidden * run.itemsize
    return (
        2 * run.chunks * (size / run.tensor / (link.bandwidth * cluster.rates.link) + link.latency)
    )


def gradient_time(network: Network, run: Run, cluster: Cluster, backward: float) -> float:
    """Returns the seconds of the gradients' reduction that the backward pass does not hide."""
    whole, rounds = gradient_ring(network, run, cluster)
    backward *= run.micro_batches if run.zero_stage > 1 else 1
    return max(whole * rounds - cluster.rates.overlap * backward, 0.0)


def gradient_ring(network: Network, run: Run, cluster: Cluster) -> tuple[float, float]:
    """Returns the seconds of an all-reduce of a rank's gradients, and how many of them a step needs."""
    size = network.parameters / (run.tensor * run.pipeline) * run.gradient_itemsize
    link = cluster.link(run.data, run.tensor)
    # Stage 2 scatters the gradients of each micro-batch and gathers the weights once, each half of an all-reduce.
    # Stage 3 gathers the weights for both passes of each micro-batch too (Rajbhandari et al. 2020, section 7).
    rounds = {2: (run.micro_batches + 1) / 2, 3: 1.5 * run.micro_batches}.get(run.zero_stage, 1.0)
    return ring_all_reduce(size, run.data, link, cluster.rates), rounds


def update_time(network: Network, run: Run, cluster: Cluster) -> float:
    """Returns the seconds of clipping and AdamW."""
    return update_bytes(network, run) / (cluster.device.bandwidth * cluster.rates.update)


def update_bytes(network: Network, run: Run) -> float:
    """Returns the bytes that a rank's clipping and AdamW read and write.

    Per element: 4 bytes to read for the norm; the update reads gradient, weight and two moments of 4 bytes, and writes
    the last three and a weight of `itemsize` bytes.
    """
    own = network.parameters / (run.tensor * run.pipeline) / (run.data if run.zero_stage else 1)
    return own * (4 + 28 + run.itemsize)


def model_flops(network: Network, run: Run) -> float:
    """Returns the FLOPs of a step of all devices, 3 times those of the forward pass; scores count whole, as in MFU."""
    whole = Run(
        run.gpus,
        run.global_batch,
        run.global_batch,
        run.length,
        run.target_length,
        fused_attention=False,
    )
    blocks = sum(stack.layers * found.flops for stack, found, _ in _stacks(network, whole))
    return 3 * (blocks + head_pass(network, whole).flops)
