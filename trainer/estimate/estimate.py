"""The peak of a training step's memory: the largest of the moments at which it can be reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...models.common.config import ModelConfig
from ...models.sizes import ParameterSize
from .engines import EngineMemory, engine_memory
from .job import Job
from .model import ModelMemory, hf_model_memory, model_memory

MIB = 1 << 20
FRAMEWORK = {"cuda": 600 * MIB, "cpu": 400 * MIB}
"""Outside of tensors: the CUDA context with its kernels and cuBLAS's workspaces, or Python with its imports."""
LARGEST_MICRO_BATCH = 1 << 20


@dataclass(frozen=True)
class Moment:
    """A moment of a training step, and the bytes that exist then, by what they are."""

    name: str
    lines: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.lines.values())


@dataclass(frozen=True)
class Estimate:
    """parameters, trained: elements on this rank. moments: in their order in a step."""

    parameters: int
    trained: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def estimate(config: ModelConfig | Any, job: Job) -> Estimate:
    """Memory of one rank.

    config: of a family of the zoo, or transformers' own of another decoder. ValueError for a job that the trainer
    would refuse, or the model does not allow.
    """
    memory = model_memory(config, job) if isinstance(config, ModelConfig) else hf_model_memory(config, job)
    return estimate_of(memory, job)


def estimate_of(model: ModelMemory, job: Job) -> Estimate:
    """From a model's memory, of a family of the zoo or not."""
    engine = engine_memory(model, job)
    return Estimate(
        parameters=sum(size.local for size in model.parameters),
        trained=sum(size.local for size in model.trained),
        moments=tuple(_moments(model, engine, job)),
    )


def largest_micro_batch(fits: Callable[[int], bool]) -> int:
    """The largest micro-batch for which `fits` is true, which is false from some size on; 0 for none."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < LARGEST_MICRO_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _moments(model: ModelMemory, engine: EngineMemory, job: Job) -> list[Moment]:
    e = job.itemsize

    def grown(sizes: Sequence[ParameterSize]) -> int:
        return round(engine.grown * e * sum(size.local for size in sizes))

    fixed = {
        "parameters": engine.parameters,
        "fp32 master weights": engine.masters,
        "optimizer state": engine.states,
        "framework": FRAMEWORK[job.device],
    }

    def at(
        name: str, gradients: int, activations: int = 0, logits: int = 0, working: int = 0, bucket: int = engine.bucket
    ) -> None:
        lines = {
            "gradients": gradients,
            "communication buffers": engine.buffers + bucket,
            "activations": activations,
            "logits and loss": logits,
            "temporary tensors": working,
        }
        moments.append(Moment(name, fixed | lines))

    # The gradient of a table that is used again, by the head or by the decoder, is on its way from there to the first
    # look-up. Where gradients grow, the head's is counted among them.
    table = e * model.table.local if model.table else 0
    from_head = table if model.is_tied and not engine.grown else 0
    from_decoder = table if not model.is_tied else 0

    moments: list[Moment] = []
    kept = [part.layers * part.block.kept for part in model.parts]
    head = (model.head,) if model.head else ()
    at("the loss's backward", engine.held, sum(kept) + model.ends, model.logits + model.loss, bucket=0)
    at("the head's backward", engine.held + grown(head), sum(kept) + model.ends, model.logits, model.stream + from_head)
    gradients = engine.held + grown(head)
    for number in reversed(range(len(model.parts))):
        part, before = model.parts[number], sum(kept[:number])
        used_again = number < len(model.parts) - 1
        working = part.block.working + from_head + (from_decoder if used_again else 0)
        at("the last block's backward", gradients, before + kept[number] + model.ends, 0, working)
        gradients += grown(part.parameters)
        at("the first block's backward", gradients, before + part.block.kept + model.ends, 0, working)
    everything = engine.held + grown(model.trained)
    at("the embedding's backward", everything, 0, 0, (0 if engine.grown else table) + model.pieces * table)
    at("the optimizer's step", engine.stepped, 0, 0, engine.temporaries, bucket=0)
    return moments
