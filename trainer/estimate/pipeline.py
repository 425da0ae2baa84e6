"""Checks layouts, deals a model's blocks to pipeline stages, and computes each stage's part of the
model's memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from ...models.auto import from_config, unsplit_on_meta
from ...models.blocks.attention import check_heads
from ...models.blocks.moe import check_experts
from ...models.config import ModelConfig
from ...models.pipeline import (
    assign_parameters,
    balance_blocks,
    check_block_counts,
    list_stacks,
    split_blocks_evenly,
)
from ...models.sizes import measure_parameters, parameter_sizes
from ...mpu import dropout_state, validate_layout
from ..arguments.training_arguments import TrainingArguments
from ..engines.deepspeed_config import zero_stage
from ..launch.launch import count_processes
from ..launch.rank_info import RankInfo
from .model import BlockStack, Job, ModelMemory

Partition = Literal["uniform", "parameters", "time"]
# Keys of configurations for the blocks of an encoder, and of a decoder.
DEPTHS = (("num_layers", "encoder_layers"), ("num_decoder_layers", "decoder_layers"))
REPEATS = 3  # of a timed step, after one that is not timed


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the idle share of each rank's time: (P - 1) / (M + P - 1) for P equal stages and M
    micro-batches.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Returns how many micro-batches a stage keeps activations of, between their forward and
    backward passes (1F1B).
    """
    return min(stages - stage, micro_batches)


def choose_blocks(
    config: ModelConfig, stages: int, partition: Partition, job: Job
) -> tuple[int, ...]:
    """Returns the number of blocks of each pipeline stage.

    Args:
        partition: "uniform": equal numbers; "parameters" and "time": so that the largest stage has
            as few parameters, or as little time for a micro-batch of the job, as possible. Times
            are measured on this machine.

    Raises:
        ValueError: The blocks cannot be dealt so, or this machine lacks the job's device; the
            message says what works.
    """
    model = unsplit_on_meta(config)
    if partition == "uniform":
        return split_blocks_evenly(model, stages)
    blocks = [len(stack) for _, stack in list_stacks(model)]
    if sum(blocks) < stages:
        raise ValueError(
            f"{sum(blocks)} blocks are too few for {stages} pipeline stages; use at most "
            f"{sum(blocks)}"
        )
    if partition == "time":
        return balance_blocks(measured_costs(config, blocks, job), stages)
    costs = [0] * sum(blocks)
    sizes = {size.name: size.local for size in measure_parameters(model, job.tensor_parallel_size)}
    for name, places in assign_parameters(model, [1] * len(costs)).items():
        for place in places:
            costs[place] += sizes[name]
    return balance_blocks(costs, stages)


def check_layout(arguments: TrainingArguments, config: ModelConfig, launch: RankInfo) -> None:
    """Raises ValueError if the model or the batch cannot be split over the processes."""
    size = arguments.model_parallel_size
    check_heads(config.attention_heads, size)
    parameter_sizes(config, size)
    stages = arguments.pipeline_parallel_size
    check_experts(config, arguments.expert_parallel_size)
    started = count_processes(arguments) * max(1, arguments.num_nodes)
    processes = launch.world_size if launch.world_size > 1 else started
    experts = arguments.expert_parallel_size
    data_parallel_size = experts * validate_layout(
        processes, size, stages, arguments.context_parallel_size, experts
    )
    if stages > 1:
        # Times are not measured here: if blocks can be dealt by parameters, they can be by time.
        partition = arguments.pipeline_partition
        if partition == "time":
            partition = "parameters"
        choose_blocks(config, stages, partition, Job(tensor_parallel_size=size))
    arguments.accumulation_steps(data_parallel_size)
    zero_stage(arguments)


def measured_costs(config: ModelConfig, blocks: Sequence[int], job: Job) -> list[float]:
    """Returns the seconds of each block's forward and backward passes; the last one's with the head
    and the loss.

    Models with one and two blocks of a stack are timed; the difference is a block.
    """
    own = {field.name for field in fields(config)}
    if len(blocks) == 1:
        names = [config.attribute_map.get("num_hidden_layers", "num_hidden_layers")]
    else:
        names = [next(name for name in depths if name in own) for depths in DEPTHS]
    single = dict.fromkeys(names, 1)
    whole = _measure_seconds(config.with_changes(**single), job)
    costs: list[float] = []
    rest = whole  # of the embedding, the head and the loss
    for name, count in zip(names, blocks, strict=True):
        with_two = _measure_seconds(config.with_changes(**{**single, name: 2}), job)
        block = max(with_two - whole, 1e-9)
        costs += [block] * count
        rest -= block
    costs[-1] += max(rest, 0.0)
    return costs


def _measure_seconds(config: ModelConfig, job: Job) -> float:
    """Returns the time of a micro-batch's forward and backward passes, without any split."""
    if job.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "pipeline_partition=time measures blocks on a GPU, and this machine has none; use "
            "parameters or uniform, or a machine with one"
        )
    device = torch.device(job.device)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    model: Any = from_config(config, device=device, dtype=dtype).train()
    batch = _batch(config, job, device, encoder_decoder=len(list_stacks(model)) == 2)
    times: list[float] = []
    for sample in range(1 + REPEATS):
        dropout_state.set(0, sample)
        started = time.perf_counter()
        output = model(**batch)
        loss: Any
        if "labels" in batch:
            loss = output.loss
        else:
            loss = sum(value.float().sum() for value in output.values())
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def _batch(
    config: ModelConfig, job: Job, device: torch.device, *, encoder_decoder: bool
) -> dict[str, Tensor]:
    """Returns a micro-batch; without labels if the head predicts no tokens, because what it
    predicts costs nothing.
    """
    full = partial(torch.full, fill_value=3, dtype=torch.long, device=device)
    ids = full((job.micro_batch_size, job.length))  # [B, S]
    target_length = (job.target_length or job.length) if encoder_decoder else job.length
    targets = full((job.micro_batch_size, target_length))
    if config.architecture.endswith(
        ("LMHeadModel", "CausalLM", "MaskedLM", "ConditionalGeneration")
    ):
        return {"input_ids": ids, "labels": targets}
    ids[:, -1] = getattr(config, "eos_token_id", None) or 3  # some heads classify its state
    if config.architecture.endswith("MultipleChoice"):
        ids = ids[:, None]
    return {"input_ids": ids}


def stage_memory(whole: ModelMemory, config: ModelConfig, job: Job, stage: int) -> ModelMemory:
    """Returns the part of a model's memory that is in a pipeline stage.

    Blocks keep their tensors for every micro-batch in flight. A micro-batch in flight also keeps
    the hidden states that were received, the copy that the blocks read, and those that were sent.
    """
    model = unsplit_on_meta(config)
    counts = job.pipeline_blocks or split_blocks_evenly(model, job.pipeline_parallel_size)
    check_block_counts(model, counts, job.pipeline_parallel_size)
    places = assign_parameters(model, counts)
    held = {name for name, stages in places.items() if stage in stages}
    owned = {name for name, stages in places.items() if stage == stages[0]}
    flying = in_flight(stage, len(counts), job.accumulation_steps)
    last = len(counts) - 1
    # This stage's blocks are [first, end) of all; each stack's begin at `start`.
    first = sum(counts[:stage])
    end = first + counts[stage]
    start = 0
    parts: list[BlockStack] = []
    for part, (prefix, blocks) in zip(whole.parts, list_stacks(model), strict=True):
        own = range(max(first - start, 0), max(min(end - start, len(blocks)), 0))
        names = tuple(f"{prefix}blocks.{i}." for i in own)
        parameters = tuple(size for size in part.parameters if size.name.startswith(names))
        if own:
            parts.append(BlockStack(len(own) * flying, part.block, parameters))
        start += len(blocks)

    ends = 0
    if stage > 0:
        ends += 2 * whole.stream * flying  # received, and the copy of it
    if stage < last:
        ends += whole.stream * flying  # sent
    part = replace(
        whole,
        parameters=tuple(size for size in whole.parameters if size.name in held),
        trained=tuple(size for size in whole.trained if size.name in owned),
        parts=tuple(parts),
        logits=0,
        loss=0,
        ends=ends,
        head=None,
        table=whole.table if whole.table is not None and whole.table.name in held else None,
    )
    if stage < last:
        return part
    return replace(
        part, logits=whole.logits, loss=whole.loss, ends=ends + whole.ends, head=whole.head
    )
