"""Lists the environments of training: what `env_type` may be.

Each is one entry, from which arguments, command line, help and `engines/factory.py` know it.
Importing this file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class Environment:
    """An environment of training.

    Attributes:
        name: Its name in the arguments, which is FlagAI's.
        is_one_process: Whether the run is a single process, on the device `pytorch_device`.
        uses_deepspeed: Whether DeepSpeed's engine trains, with a ZeRO stage.
        uses_fsdp: Whether parameters are split over the data-parallel ranks by torch's FSDP2.
        splits_layers: Whether layers may be split over tensor-parallel ranks.
        has_pipelines: Whether blocks may be split over pipeline stages.
    """

    name: str
    is_one_process: bool = False
    uses_deepspeed: bool = False
    uses_fsdp: bool = False
    splits_layers: bool = False
    has_pipelines: bool = False


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("pytorch", is_one_process=True),
        Environment("pytorchDDP"),
        Environment("deepspeed", uses_deepspeed=True),
        Environment("deepspeed+mpu", uses_deepspeed=True, splits_layers=True, has_pipelines=True),
        Environment("fsdp", uses_fsdp=True, splits_layers=True),
    )
}

if TYPE_CHECKING:
    EnvType = str
else:
    # For the command line and its help, and for the checks of values.
    EnvType = Literal[tuple(ENVIRONMENTS)]
