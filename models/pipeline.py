"""Cuts a model into pipeline stages, and passes hidden states from one stage to the next.

Every model of the zoo is a `PipelineStage`. Without a pipeline it is the only one.
`slice_pipeline_stage` leaves a model only the parameters of its stage, so parameters and dropout
sites keep the names that they have in the whole model. Each stage reads the same micro-batches and
computes masks, positions and labels itself; only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ..mpu import ParallelMesh, receive_from_stage, send_to_stage
from ..mpu.division import describe_sizes, divisors
from .blocks.stack import BlockArguments, BlockList
from .outputs import BackboneOutput, StageOutput
from .parallel_config import ParallelConfig


class PipelineStage(nn.Module):
    """A model, or one stage's part of it: of the embedding, of the blocks, and of what follows
    them.

    The first stage computes the embedding and the last one the head. `forward` takes the same
    arguments on all stages. On a stage that is not the last, it hands the hidden states to the next
    stage and returns a `StageOutput`.

    Attributes:
        stage: The place in a pipeline; None for a model that is not cut.
    """

    stage: StagePlace | None = None

    def run_stack(
        self,
        blocks: BlockList,
        embed: Callable[[], tuple[Tensor, Tensor | None]],
        block_arguments: BlockArguments,
        final_norm: nn.Module | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs this stage's part of a model with one stack of blocks.

        Args:
            blocks: All blocks of the model.
            embed: Computes the first block's input [B, S, H] and the word embedding table for a
                tied head. It is called on the stage of the first block; the others receive their
                input.
            block_arguments: Returns the arguments of a block after its input.
            final_norm: The norm after the last block.
        """
        if blocks.has_first:
            x, table = embed()
        else:
            x = self.receive_hidden_states()
            table = None
        states = blocks.run(x, block_arguments)
        if not blocks.has_last:
            return self.send_hidden_states(states[-1])
        if final_norm is not None:
            states[-1] = final_norm(states[-1])
        return BackboneOutput(states, table)

    def receive_hidden_states(self) -> Tensor:
        """Returns the hidden states that the previous stage has sent: in a schedule, those that the
        engine has put in place before this forward pass.
        """
        assert self.stage is not None
        return self.stage.transfer.receive()

    def send_hidden_states(self, *tensors: Tensor) -> StageOutput:
        """Hands tensors [B, S, H], joined along S, to `stage.transfer` for the next stage.

        Outside of training it sends them at once. In a schedule it keeps them until the engine,
        which called `forward`, takes them. Without tensors nothing is handed over: no later stage
        needs any.

        Returns:
            What `forward` returns on this stage. Its loss is 0, and requires a gradient like the
            loss of the last stage, because the trainer refuses a loss that does not.
        """
        assert self.stage is not None
        if not tensors:
            return StageOutput(torch.zeros(()))
        hidden = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        self.stage.transfer.send(hidden)
        needs_gradient = torch.is_grad_enabled()
        return StageOutput(torch.zeros((), device=hidden.device, requires_grad=needs_gradient))


def pack_numbers(numbers: Tensor, hidden: Tensor) -> Tensor:
    """Returns numbers [B, n] as rows [B, R, H] behind hidden states [B, S, H], which may be of a
    narrower type: the rows have the bytes of the numbers, and may only be copied.
    """
    pack: Callable[..., Tensor] = cast(Any, _PackNumbers).apply
    return pack(numbers, hidden.dtype, hidden.shape[-1])


def unpack_numbers(joined: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns hidden states [B, S, H], and the n = `count` numbers [B, n] that `pack_numbers` has put
    behind them, in fp32 or wider.
    """
    wide = torch.promote_types(joined.dtype, torch.float32)
    rows = _count_rows(count, wide, joined.dtype, joined.shape[-1])
    hidden, packed = torch.split(joined, [joined.shape[1] - rows, rows], dim=1)
    unpack: Callable[..., Tensor] = cast(Any, _UnpackNumbers).apply
    return hidden, unpack(packed, wide, count)


def _count_rows(count: int, wide: torch.dtype, dtype: torch.dtype, width: int) -> int:
    """Returns how many rows of `width` elements of type `dtype` hold `count` of type `wide`."""
    return -(-count * wide.itemsize // (dtype.itemsize * width))


def _to_rows(numbers: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Returns the bytes of numbers [B, n] as rows [B, R, width] of another type."""
    rows = _count_rows(numbers.shape[1], numbers.dtype, dtype, width)
    packed = numbers.new_zeros(len(numbers), rows * width, dtype=dtype)
    values = numbers.contiguous().view(dtype)
    packed[:, : values.shape[1]] = values
    return packed.view(len(numbers), rows, width)


def _from_rows(packed: Tensor, wide: torch.dtype, count: int) -> Tensor:
    """Reverses `_to_rows`."""
    elements = count * wide.itemsize // packed.dtype.itemsize
    return packed.flatten(1)[:, :elements].contiguous().view(wide)


class _PackNumbers(torch.autograd.Function):
    """`_to_rows`; the gradient is packed in the same way."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        ctx.described = (numbers.dtype, numbers.shape[1])
        return _to_rows(numbers, dtype, width)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _from_rows(grads[0], *ctx.described), None, None


class _UnpackNumbers(torch.autograd.Function):
    """`_from_rows`; the gradient is packed in the same way."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, wide: torch.dtype, count: int) -> Tensor:
        ctx.described = (packed.dtype, packed.shape[2])
        return _from_rows(packed, wide, count)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _to_rows(grads[0], *ctx.described), None, None


class StageTransfer(Protocol):
    """How hidden states come from the previous stage and get to the next one."""

    def receive(self) -> Tensor:
        """Returns what the previous stage has sent."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Takes hidden states for the next stage."""
        ...


class PeerTransfer:
    """Moves hidden states by messages between stages, without gradients, outside of training."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh

    def receive(self) -> Tensor:
        return receive_from_stage(self.mesh.pp_rank - 1, self.mesh)

    def send(self, hidden: Tensor) -> None:
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise ValueError(
                "a pipeline stage is trained by Trainer; for logits or a loss alone, use "
                "torch.no_grad()"
            )
        send_to_stage(hidden, self.mesh.pp_rank + 1, self.mesh)


class StagePlace:
    """The place of a stage in its pipeline.

    Attributes:
        counts: The number of blocks of each stage, over all stacks in the order of the forward
            pass.
        index, last: The number of this stage, and that of the last one.
        holders: The stages that hold each parameter that several of them hold, by name. The first
            one owns it.
        transfer: How hidden states reach this stage and leave it. An engine with a schedule of its
            own replaces it during its passes.
    """

    def __init__(self, mesh: ParallelMesh, counts: Sequence[int]) -> None:
        self.mesh = mesh
        self.counts = tuple(counts)
        self.index = mesh.pp_rank
        self.last = len(self.counts) - 1
        self.holders: dict[str, tuple[int, ...]] = {}
        self.transfer: StageTransfer = PeerTransfer(mesh)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.last


def slice_pipeline_stage(
    model: nn.Module, mesh: ParallelMesh | None, parallel_config: ParallelConfig | None = None
) -> None:
    """Removes all but this rank's stage from a model on the meta device, if the mesh has several
    stages.

    Args:
        parallel_config: Its `pipeline_blocks` are the number of blocks of each stage; by default,
            equal numbers.

    Raises:
        ValueError: The blocks cannot be dealt to the stages.
    """
    if mesh is None or mesh.pp_size == 1:
        return
    counts = None if parallel_config is None else parallel_config.pipeline_blocks
    if counts is None:
        counts = split_blocks_evenly(model, mesh.pp_size)
    check_block_counts(model, counts, mesh.pp_size)
    place = StagePlace(mesh, counts)
    cast(PipelineStage, model).stage = place
    stages = assign_parameters(model, counts)
    place.holders = {name: held for name, held in stages.items() if len(held) > 1}

    # Parameters of other stages become None; the modules around them stay, and with them all names.
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        for attribute, parameter in own:
            if place.index not in stages[names[parameter]]:
                module.register_parameter(attribute, None)

    first = 0
    for _, blocks in list_stacks(model):
        numbers = range(len(blocks))
        own = [i for i in numbers if find_stage(first + i, counts) == place.index]
        blocks.own = range(own[0], own[-1] + 1) if own else range(0)
        first += len(blocks)
    model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)


def _refuse_hidden_states(
    model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raises ValueError on every stage alike if a call asks for the hidden states of all blocks."""
    if options.get("output_hidden_states"):
        stage = cast(StagePlace, model.stage)
        raise ValueError(
            "output_hidden_states needs all blocks in one process, and this is stage "
            f"{stage.index} of "
            f"{len(stage.counts)}; use pipeline_parallel_size=1"
        )


def is_last_stage(model: Any) -> bool:
    """Returns whether a model computes logits and losses: it is whole, or the last stage of a
    pipeline.
    """
    stage: StagePlace | None = getattr(model, "stage", None)
    return stage is None or stage.is_last


def find_copied_parameters(model: Any) -> set[str]:
    """Returns the names of a stage's parameters that an earlier stage owns, which updates and saves
    them.
    """
    stage: StagePlace | None = getattr(model, "stage", None)
    if stage is None:
        return set()
    return {name for name, held in stage.holders.items() if stage.index in held[1:]}


def list_stacks(model: nn.Module) -> list[tuple[str, BlockList]]:
    """Returns the stacks of blocks in the order of the forward pass.

    Each is the prefix of its owner's parameter names, such as "encoder.", and its blocks.
    """
    stacks: list[tuple[str, BlockList]] = []
    for path, module in cast(Any, model).named_modules():
        if isinstance(module, BlockList):
            stacks.append((path.removesuffix("blocks"), module))
    return stacks


def assign_parameters(model: nn.Module, counts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter, by name; the first of them owns it.

    What is registered before a stack's blocks belongs to the stage of its first block, and what
    follows them to that of its last. Encoder and decoder may share what precedes both. A tied
    parameter is where each of its names is, and what the owner of the blocks lists in
    `shared_by_blocks` is on all stages of the stack.
    """
    stacks = list_stacks(model)
    stages_of_blocks: list[list[int]] = []  # [stack][block] -> stage
    for _, blocks in stacks:
        first = sum(map(len, stages_of_blocks))
        stages_of_blocks.append([find_stage(first + i, counts) for i in range(len(blocks))])
    names = {parameter: name for name, parameter in model.named_parameters()}
    stages: dict[str, set[int]] = {name: set() for name in names.values()}
    passed: set[int] = set()  # the stacks whose blocks have been seen
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = None
        for number, (prefix, _) in enumerate(stacks):
            if name.startswith(f"{prefix}blocks."):
                inside = number
                break
        if inside is None:
            found = _find_stages_outside_blocks(model, name, stacks, stages_of_blocks, passed)
            stages[names[parameter]] |= found
            continue
        passed.add(inside)
        block = int(name.removeprefix(f"{stacks[inside][0]}blocks.").partition(".")[0])
        stages[names[parameter]].add(stages_of_blocks[inside][block])
    return {name: tuple(sorted(found)) for name, found in stages.items()}


def _find_stages_outside_blocks(
    model: nn.Module,
    name: str,
    stacks: list[tuple[str, BlockList]],
    stages_of_blocks: list[list[int]],
    passed: set[int],
) -> set[int]:
    """Returns the stages of a parameter that is in no block.

    `passed` are the stacks registered before it.
    """
    home = None
    for number, (prefix, _) in enumerate(stacks):
        if prefix and name.startswith(prefix):
            home = number
            break
    if home is None:
        # It belongs to no stack: to the first stages of all stacks that follow, or to the end of
        # the model.
        following = [stages_of_blocks[s] for s in range(len(stacks)) if s not in passed]
        return {stack[0] for stack in following} or {stages_of_blocks[-1][-1]}
    prefix = stacks[home][0]
    owner: Any = model.get_submodule(prefix.removesuffix("."))
    if name.removeprefix(prefix).partition(".")[0] in getattr(owner, "shared_by_blocks", ()):
        return set(stages_of_blocks[home])
    return {stages_of_blocks[home][-1 if home in passed else 0]}


def find_stage(block: int, counts: Sequence[int]) -> int:
    """Returns the stage of a block, which is counted over all stacks."""
    for stage, end in enumerate(accumulate(counts)):
        if block < end:
            return stage
    raise IndexError(f"there is no block {block} in stages of {tuple(counts)}")


def split_blocks_evenly(model: nn.Module, stages: int) -> tuple[int, ...]:
    """Returns equal numbers of blocks for all stages.

    Raises ValueError if the number of blocks is no multiple.
    """
    blocks = sum(len(stack) for _, stack in list_stacks(model))
    if blocks % stages:
        raise ValueError(
            f"{blocks} blocks cannot be dealt evenly to {stages} pipeline stages; use "
            "pipeline_parallel_size "
            f"{describe_sizes(divisors(blocks))}, or pipeline_partition=parameters"
        )
    return (blocks // stages,) * stages


def check_block_counts(model: nn.Module, counts: Sequence[int], stages: int) -> None:
    """Raises ValueError unless `counts` deals all blocks to the stages, at least one to each."""
    blocks = sum(len(stack) for _, stack in list_stacks(model))
    if len(counts) != stages or sum(counts) != blocks or min(counts) < 1:
        raise ValueError(
            f"pipeline_blocks={tuple(counts)} must give each of {stages} stages at least one "
            f"block, {blocks} in all"
        )


def balance_blocks(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns the number of consecutive blocks of each stage, so that the largest sum of a stage's
    costs is least.
    """
    ends = [0.0, *accumulate(costs)]

    @cache
    def find_best(first: int, stages_left: int) -> tuple[float, tuple[int, ...]]:
        """Returns the largest cost, and the counts, of the best way to deal `costs[first:]` to the
        remaining stages.
        """
        if stages_left == 1:
            return ends[-1] - ends[first], (len(costs) - first,)
        options: list[tuple[float, tuple[int, ...]]] = []
        for count in range(1, len(costs) - first - stages_left + 2):
            rest, counts = find_best(first + count, stages_left - 1)
            options.append((max(ends[first + count] - ends[first], rest), (count, *counts)))
        return min(options)

    return find_best(0, stages)[1]
