"""Lists the engines, and makes the one of a run.

To add an engine, write its class in a file of this folder, and its entry in `ENGINES`. If it is for
a new `env_type`, that needs an entry in `environments.py` too, from which arguments, command line
and help know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
from .engine import Engine


@dataclass(frozen=True)
class EngineEntry:
    """An engine, and where it runs.

    Attributes:
        env_types: The environments that it runs in.
        build: Makes it. The model already has its device and its precision. Imports it at the first
            use, because importing DeepSpeed takes seconds.
        takes_pipelines: Whether it trains models that are cut into pipeline stages; other engines
            train whole ones.
    """

    name: str
    env_types: tuple[str, ...]
    build: Callable[[nn.Module, Optimizer, TrainingArguments, Ranks], Engine]
    takes_pipelines: bool = False


def _build_torch_engine(
    model: nn.Module, optimizer: Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    from .torch_engine import TorchEngine

    return TorchEngine(model, optimizer, arguments)


def _build_ddp_engine(
    model: nn.Module, optimizer: Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    from .ddp_engine import DDPEngine

    return DDPEngine(model, optimizer, arguments, ranks)


def _build_deepspeed_engine(
    model: nn.Module, optimizer: Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    from .deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(model, optimizer, arguments, ranks)


def _build_pipeline_engine(
    model: nn.Module, optimizer: Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    from .pipeline_engine import PipelineEngine

    return PipelineEngine(model, optimizer, arguments, ranks)


ENGINES = (
    EngineEntry("PyTorch", ("pytorch",), _build_torch_engine),
    EngineEntry("DDP", ("pytorchDDP",), _build_ddp_engine),
    EngineEntry("DeepSpeed", ("deepspeed", "deepspeed+mpu"), _build_deepspeed_engine),
    EngineEntry(
        "DeepSpeed pipelines", ("deepspeed+mpu",), _build_pipeline_engine, takes_pipelines=True
    ),
)


def find_engine(env_type: str, *, has_pipeline: bool) -> EngineEntry:
    """Returns the entry of the engine for an environment, with or without pipeline stages."""
    for entry in ENGINES:
        if env_type in entry.env_types and entry.takes_pipelines == has_pipeline:
            return entry
    raise ValueError(
        f"no engine for env_type={env_type!r} {'with' if has_pipeline else 'without'} pipeline "
        "stages"
    )


def make_engine(
    model: nn.Module, optimizer: Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    """Returns the engine of a run. The model already has its device and its precision."""
    entry = find_engine(arguments.env_type, has_pipeline=ranks.pp_size > 1)
    return entry.build(model, optimizer, arguments, ranks)
