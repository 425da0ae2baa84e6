"""Makes the engine of a run, by what its entry in `environments.py` says of the environment."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from ..arguments.training_arguments import TrainingArguments
from ..environments import ENVIRONMENTS
from ..launch.ranks import Ranks
from .engine import Engine


def make_engine(
    model: nn.Module, optimizer: Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    """Returns the engine of a run. The model already has its device and its precision.

    An engine is imported when it is used, because importing DeepSpeed takes seconds.

    Raises:
        ValueError: The model is cut into pipeline stages, which only DeepSpeed trains here.
    """
    environment = ENVIRONMENTS[arguments.env_type]
    if ranks.pp_size > 1 and not environment.splits_layers:
        raise ValueError(
            f"no engine for env_type={arguments.env_type!r} with pipeline stages; use one of "
            f"{', '.join(entry.name for entry in ENVIRONMENTS.values() if entry.splits_layers)}"
        )
    if ranks.pp_size > 1:
        from .pipeline_engine import PipelineEngine

        return PipelineEngine(model, optimizer, arguments, ranks)
    if environment.uses_deepspeed:
        from .deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, optimizer, arguments, ranks)
    if environment.is_one_process:
        from .torch_engine import TorchEngine

        return TorchEngine(model, optimizer, arguments)
    from .ddp_engine import DDPEngine

    return DDPEngine(model, optimizer, arguments, ranks)
