"""Cuts a model into pipeline stages, and passes hidden states from one stage to the next.

A stage is the whole model whose parameters of other stages are None, so parameters and dropout sites keep their names.
Each stage reads the same micro-batches and computes masks, positions and labels itself; only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..mpu import ParallelMesh, broadcast_from_stage, receive_from_stage, send_to_stage
from ..mpu.division import describe_sizes, divisors
from .blocks.stack import StageEnd
from .outputs import EncoderOutput, ModelOutput
from .parallel_config import ParallelConfig


@dataclass
class StageOutput(ModelOutput):
    """The output of a stage that is not the last: the loss is a zero, and there are no logits."""

    loss: Tensor


class Stage:
    """A model's place in a pipeline, and the hidden states that enter and leave it.

    Args:
        counts: The number of blocks of each stage, over all stacks in the order of the forward pass.
    """

    def __init__(self, mesh: ParallelMesh, counts: Sequence[int]) -> None:
        self.mesh, self.counts = mesh, tuple(counts)
        self.index, self.last = mesh.pp_rank, len(self.counts) - 1
        self.holders: dict[str, tuple[int, ...]] = {}
        """The stages that hold each parameter that is on several."""
        self.scheduled = False
        """Whether an engine's schedule moves the hidden states: it sets `received` and reads `sent`."""
        self.received: Tensor | None = None
        self.sent: Tensor | None = None
        self.held: Tensor | None = None
        """A decoder's hidden states, which were received together with the encoder's output."""
        self.source: Tensor | None = None
        """The encoder's output, which passes from stage to stage with the decoder's hidden states."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.last

    def receive(self) -> Tensor:
        """Returns the hidden states of the previous stage."""
        if self.held is not None:
            held, self.held = self.held, None
            return held
        if not self.scheduled:
            return receive_from_stage(self.index - 1, self.mesh)
        received, self.received = self.received, None
        assert received is not None
        return received

    def send(self, hidden: Tensor | None) -> StageOutput:
        """Passes hidden states [B, S, H] to the next stage, and after them the encoder's output, if there is one."""
        tensors = [tensor for tensor in (hidden, self.source) if tensor is not None]
        if not tensors:
            return StageOutput(torch.zeros(()))
        hidden = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        if self.scheduled:
            self.sent = hidden
        elif torch.is_grad_enabled() and hidden.requires_grad:
            raise ValueError(
                "a pipeline stage is trained by Trainer; for logits or a loss alone, use torch.no_grad()"
            )
        else:
            send_to_stage(hidden, self.index + 1, self.mesh)
        return StageOutput(
            torch.zeros((), device=hidden.device, requires_grad=torch.is_grad_enabled())
        )


@dataclass(frozen=True)
class Part:
    """The blocks of a stack that are in a stage, see `PipelinePart`."""

    stage: Stage
    own: range

    def enter(self, x: Any) -> Tensor:
        return self.stage.receive() if self.own.start else x

    @property
    def begins(self) -> bool:
        """Whether the stage has the first block."""
        return len(self.own) > 0 and self.own.start == 0


def take_stage(
    model: nn.Module, mesh: ParallelMesh | None, parallel_config: ParallelConfig | None = None
) -> None:
    """Makes a model without storage this rank's stage of a pipeline, in place, if the mesh has several stages.

    Raises ValueError if the blocks cannot be dealt to the stages.
    """
    if mesh is None or mesh.pp_size == 1:
        return
    given = None if parallel_config is None else parallel_config.pipeline_blocks
    counts = equal_counts(model, mesh.pp_size) if given is None else given
    check_counts(model, counts, mesh.pp_size)
    whole: Any = model
    whole.stage = stage = Stage(mesh, counts)
    stages = stages_of_parameters(model, counts)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for attribute, parameter in list(
            module.named_parameters(recurse=False, remove_duplicate=False)
        ):
            if stage.index not in stages[names[parameter]]:
                module.register_parameter(attribute, None)
    stage.holders = {name: holders for name, holders in stages.items() if len(holders) > 1}
    first = 0
    for prefix, blocks in stacks_of(model):
        own = [i for i in range(len(blocks)) if _stage_of(first + i, counts) == stage.index]
        blocks.part = Part(stage, range(own[0], own[-1] + 1) if own else range(0))
        first += len(blocks)
        if not blocks.part.begins:
            owner: Any = model.get_submodule(prefix.removesuffix("."))
            owner.embed = _nothing
    if hasattr(whole, "word_embeddings") and not any(
        blocks.part.begins for _, blocks in stacks_of(model)
    ):
        whole.word_embeddings.embed = _nothing
    if len(stacks_of(model)) == 2:
        _take_stage_of_two_stacks(whole, stage)
    forward = whole.forward

    @wraps(forward)
    def run_stage(*inputs: Any, **options: Any) -> Any:
        if options.get("output_hidden_states"):
            raise ValueError(
                f"output_hidden_states needs all blocks in one process, and this is stage {stage.index} of "
                f"{len(stage.counts)}; use pipeline_parallel_size=1"
            )
        try:
            return forward(*inputs, **options)
        except StageEnd as end:
            return stage.send(end.hidden)
        finally:
            stage.source = None

    whole.forward = run_stage


def _take_stage_of_two_stacks(model: Any, stage: Stage) -> None:
    """Lets an encoder-decoder skip a stack without blocks in this stage, and pass the encoder's output along."""
    encoder: Part = model.encoder.blocks.part
    decoder: Part = model.decoder.blocks.part
    run_encoder, encode = model.run_encoder, model.encode
    last = _stage_of(len(model.encoder.blocks) - 1, stage.counts)

    def run(input_ids: Tensor, attention_mask: Tensor | None) -> Any:
        if encoder.own:
            states, table = run_encoder(input_ids, attention_mask)
            stage.source = states[-1]
        else:
            states, table = [_take_source(model, stage, decoder, input_ids.shape[1])], None
        if not decoder.own:
            raise StageEnd(None)
        return states, table

    @wraps(encode)
    def encode_on_all_stages(*inputs: Any, **options: Any) -> EncoderOutput:
        output = None
        if encoder.own:
            model.run_encoder = run_encoder  # no decoder follows
            try:
                output = encode(*inputs, **options).last_hidden_state
            except StageEnd as end:
                stage.send(end.hidden)
            finally:
                model.run_encoder = run
        return EncoderOutput(broadcast_from_stage(output, last, stage.mesh))

    model.run_encoder, model.encode = run, encode_on_all_stages
    if not decoder.own:
        model.decoder.forward = _end


def _take_source(model: Any, stage: Stage, decoder: Part, length: int) -> Tensor:
    """Returns the encoder's output, of so many positions, from what was received, and holds the decoder's part."""
    stage.source = source = stage.receive()
    if not decoder.begins:
        length //= stage.mesh.tp_size if model.parallel_config.sequence_parallel else 1
        stage.held, stage.source = torch.split(source, [source.shape[1] - length, length], dim=1)
    return stage.source


def _end(*inputs: Any, **options: Any) -> Any:
    """Stands for the forward pass of a decoder whose blocks are in later stages."""
    raise StageEnd(None)


def _nothing(*inputs: Any, **options: Any) -> tuple[None, None]:
    """Stands for the embeddings on a later stage."""
    return None, None


def is_last_stage(model: Any) -> bool:
    """Returns whether a model computes logits and losses: it is whole, or the last stage of a pipeline."""
    stage: Stage | None = getattr(model, "stage", None)
    return stage is None or stage.is_last


def copied_parameters(model: Any) -> set[str]:
    """Returns the names of a stage's parameters that an earlier stage owns, which updates and saves them."""
    stage: Stage | None = getattr(model, "stage", None)
    return (
        set()
        if stage is None
        else {name for name, held in stage.holders.items() if stage.index in held[1:]}
    )


def stacks_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the stacks of blocks in the order of the forward pass: prefix of the owner's names, and the blocks."""
    modules = cast(Any, model).named_modules()
    return [
        (path.removesuffix("blocks"), module)
        for path, module in modules
        if isinstance(module, nn.ModuleList) and path.rpartition(".")[2] == "blocks"
    ]


def stages_of_parameters(model: nn.Module, counts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter, by name; the first of them owns it.

    What is registered before a stack's blocks belongs to the stage of its first block, and what follows them to that of
    its last. Encoder and decoder may share what precedes both. A tied parameter is where each of its names is, and what
    the owner of the blocks lists in `shared_by_blocks` is on all stages of the stack.
    """
    stacks = stacks_of(model)
    where: list[list[int]] = []  # [stack][block] -> stage
    for _, blocks in stacks:
        first = sum(map(len, where))
        where.append([_stage_of(first + i, counts) for i in range(len(blocks))])
    names = {parameter: name for name, parameter in model.named_parameters()}
    stages: dict[str, set[int]] = {name: set() for name in names.values()}
    passed: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next(
            (s for s, (prefix, _) in enumerate(stacks) if name.startswith(f"{prefix}blocks.")), None
        )
        if inside is not None:
            passed.add(inside)
            block = int(name.removeprefix(f"{stacks[inside][0]}blocks.").partition(".")[0])
            stages[names[parameter]].add(where[inside][block])
            continue
        stages[names[parameter]] |= _stages_outside_blocks(model, name, stacks, where, passed)
    return {name: tuple(sorted(found)) for name, found in stages.items()}


def _stages_outside_blocks(
    model: nn.Module,
    name: str,
    stacks: list[tuple[str, Any]],
    where: list[list[int]],
    passed: set[int],
) -> set[int]:
    """Returns the stages of a parameter that is in no block. `passed` are the stacks registered before it."""
    home = next(
        (s for s, (prefix, _) in enumerate(stacks) if prefix and name.startswith(prefix)), None
    )
    if home is None:
        left = [where[s] for s in range(len(stacks)) if s not in passed]
        return {stack[0] for stack in left} or {where[-1][-1]}
    prefix = stacks[home][0]
    owner: Any = model.get_submodule(prefix.removesuffix("."))
    if name.removeprefix(prefix).partition(".")[0] in getattr(owner, "shared_by_blocks", ()):
        return set(where[home])
    return {where[home][-1] if home in passed else where[home][0]}


def _stage_of(block: int, counts: Sequence[int]) -> int:
    return next(stage for stage, end in enumerate(accumulate(counts)) if block < end)


def equal_counts(model: nn.Module, stages: int) -> tuple[int, ...]:
    """Returns equal numbers of blocks for all stages. Raises ValueError if the number of blocks is no multiple."""
    blocks = sum(len(stack) for _, stack in stacks_of(model))
    if blocks % stages:
        raise ValueError(
            f"{blocks} blocks cannot be dealt evenly to {stages} pipeline stages; use pipeline_parallel_size "
            f"{describe_sizes(divisors(blocks))}, or pipeline_partition=parameters"
        )
    return (blocks // stages,) * stages


def check_counts(model: nn.Module, counts: Sequence[int], stages: int) -> None:
    """Raises ValueError unless `counts` deals all blocks to `stages` stages, at least one to each."""
    blocks = sum(len(stack) for _, stack in stacks_of(model))
    if len(counts) != stages or sum(counts) != blocks or min(counts) < 1:
        raise ValueError(
            f"pipeline_blocks={tuple(counts)} must give each of {stages} stages at least one block, {blocks} in all"
        )


def balanced_counts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns the number of consecutive blocks of each stage, so that the largest sum of a stage's costs is least."""
    ends = [0.0, *accumulate(costs)]

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return ends[-1] - ends[first], (len(costs) - first,)
        options: list[tuple[float, tuple[int, ...]]] = []
        for count in range(1, len(costs) - first - left + 2):
            rest, counts = best(first + count, left - 1)
            options.append((max(ends[first + count] - ends[first], rest), (count, *counts)))
        return min(options)

    return best(0, stages)[1]
