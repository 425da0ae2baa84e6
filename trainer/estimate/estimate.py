"""The peak of a training step's memory: the largest of the moments at which it can be reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...models.common.config import ModelConfig
from .engines import EngineMemory, engine_memory
from .job import Job
from .model import ModelMemory, model_memory

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


def estimate(config: ModelConfig, job: Job) -> Estimate:
    """Memory of one rank. ValueError for a job that the trainer would refuse, or the model does not allow."""
    return estimate_of(model_memory(config, job), job)


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


def with_micro_batch(job: Job, size: int) -> Job:
    return replace(job, micro_batch_size=size)


def _moments(model: ModelMemory, engine: EngineMemory, job: Job) -> list[Moment]:
    e = job.itemsize
    grown = lambda sizes: round(engine.grown * e * sum(size.local for size in sizes))  # noqa: E731
    fixed = {
        "parameters": engine.parameters,
        "fp32 master weights": engine.masters,
        "optimizer state": engine.states,
        "communication buffers": engine.buffers,
        "framework": FRAMEWORK[job.device],
    }

    def at(name: str, gradients: int, activations: int = 0, logits: int = 0, working: int = 0) -> None:
        lines = {
            "gradients": gradients,
            "activations": activations,
            "logits and loss": logits,
            "temporary tensors": working,
        }
        moments.append(Moment(name, fixed | lines))

    moments: list[Moment] = []
    kept = [part.layers * part.block.kept for part in model.parts]
    head = (model.head,) if model.head else ()
    at("the loss's backward", engine.held, sum(kept) + model.ends, model.logits + model.loss)
    at("the head's backward", engine.held + grown(head), sum(kept) + model.ends, model.loss, model.stream)
    gradients = engine.held + grown(head)
    for number in reversed(range(len(model.parts))):
        part, before = model.parts[number], sum(kept[:number])
        working = part.block.recomputed + part.block.working
        at("the last block's backward", gradients, before + kept[number] + model.ends, 0, working)
        gradients += grown(part.parameters)
        at("the first block's backward", gradients, before + part.block.kept + model.ends, 0, working)
    everything = engine.held + grown(model.trained)
    # An embedding that is also the head, or is used twice, gets its gradient in a second piece, as large as the table.
    shared = model.table is not None and (model.table is model.head or len(model.parts) > 1)
    at("the embedding's backward", everything, 0, 0, e * model.table.local if shared and model.table else 0)
    at("the optimizer's step", max(engine.stepped, everything), 0, 0, engine.temporaries)
    return moments
