"""Makes the engine of a run, by what its entry in `environments.py` says of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments.training_arguments import TrainingArguments
from ..environments import ENVIRONMENTS
from ..launch.ranks import Ranks
from .engine import Engine

if TYPE_CHECKING:
    from .fully_sharded import ShardedModel


def shard_model(
    model: nn.Module,
    arguments: TrainingArguments,
    ranks: Ranks,
    optimizer: Optimizer | None,
    rows: Mapping[str, Tensor] | None = None,
) -> ShardedModel | None:
    """Splits the parameters of a model in place, if the environment asks for it.

    Args:
        optimizer: One that the caller has made, which gets the new parameters.
        rows: What `take_rows` returned.
    """
    if not ENVIRONMENTS[arguments.env_type].uses_fsdp:
        return None
    # Importing it takes a second.
    from .fully_sharded import ShardedModel

    return ShardedModel(model, arguments, ranks, optimizer, rows)


def take_rows(model: nn.Module, arguments: TrainingArguments) -> dict[str, Tensor] | None:
    """Makes a model that an earlier run has split an ordinary one again.

    Returns this rank's rows if the next run splits the model alike; the model then has no storage.
    Otherwise its parameters are whole. Collective.
    """
    sharded: ShardedModel | None = getattr(model, "sharded_model", None)
    if sharded is None:
        return None
    adapts = arguments.lora_rank or arguments.adapter is not None
    is_split_alike = (
        ENVIRONMENTS[arguments.env_type].uses_fsdp and arguments.fsdp_replicas == sharded.replicas
    )
    if is_split_alike and not adapts:
        return sharded.take_rows()
    sharded.gather()
    return None


def gather_parameters(model: nn.Module) -> None:
    """Makes a model that was trained with env_type="fsdp" an ordinary one, with whole parameters on
    every data-parallel rank, in place. Collective. Any other model stays as it is.

        trainer.train(model, train_dataset=samples)
        gather_parameters(model)
    """
    sharded: ShardedModel | None = getattr(model, "sharded_model", None)
    if sharded is not None:
        sharded.gather()


def compute_in_fp32(model: nn.Module, arguments: TrainingArguments, ranks: Ranks) -> None:
    """Makes a model compute in fp32, with the values of its files."""
    sharded: ShardedModel | None = getattr(model, "sharded_model", None)
    if sharded is None:
        model.float()
        return
    rounded = {}
    for part in sharded.parameters:
        rounded[part.name] = part.local.detach().to(part.stored_dtype).float()
    sharded.take_rows()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    shard_model(model, replace(arguments, precision="fp32"), ranks, None, rounded)


def make_engine(
    model: nn.Module,
    optimizer: Optimizer,
    arguments: TrainingArguments,
    ranks: Ranks,
    sharded: ShardedModel | None = None,
) -> Engine:
    """Returns the engine of a run. The model already has its device and its precision, and its
    parameters are split if the environment asks for it (`sharded`).

    An engine is imported when it is used, because importing DeepSpeed takes seconds.

    Raises:
        ValueError: The model is cut into pipeline stages, which only DeepSpeed trains here.
    """
    environment = ENVIRONMENTS[arguments.env_type]
    if ranks.pp_size > 1 and not environment.has_pipelines:
        raise ValueError(
            f"no engine for env_type={arguments.env_type!r} with pipeline stages; use one of "
            f"{', '.join(entry.name for entry in ENVIRONMENTS.values() if entry.has_pipelines)}"
        )
    if ranks.pp_size > 1:
        from .pipeline_engine import PipelineEngine

        return PipelineEngine(model, optimizer, arguments, ranks)
    if environment.uses_deepspeed:
        from .deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, optimizer, arguments, ranks)
    if environment.uses_fsdp:
        from .fsdp_engine import FSDPEngine

        assert sharded is not None
        return FSDPEngine(sharded, optimizer, arguments, ranks)
    if environment.is_one_process:
        from .torch_engine import TorchEngine

        return TorchEngine(model, optimizer, arguments)
    from .ddp_engine import DDPEngine

    return DDPEngine(model, optimizer, arguments, ranks)
