"""Describes how a run is split and what runs its steps, for the first lines of a command."""

from __future__ import annotations

from ..arguments.training_arguments import TrainingArguments
from ..engines.deepspeed_config import zero_stage


def describe_mesh(
    stages: int, dp_size: int, tp_size: int, cp_size: int = 1, ep_size: int = 1
) -> str:
    """Returns how many processes there are, and what each axis of the mesh splits.

    Args:
        ep_size: How many of the data-parallel ranks share the experts.
    """
    pipeline = f"{stages} pipeline stages x " if stages > 1 else ""
    context = f"{cp_size} context-parallel x " if cp_size > 1 else ""
    expert = f", of which {ep_size} expert-parallel" if ep_size > 1 else ""
    count = stages * dp_size * cp_size * tp_size
    processes = "1 process" if count == 1 else f"{count} processes"
    return (
        f"{pipeline}{tp_size} tensor-parallel x {context}{dp_size} data-parallel{expert} = "
        f"{processes}"
    )


def describe_engine(arguments: TrainingArguments) -> str:
    """Returns what runs the training step, with the stage of ZeRO if it is not 0."""
    engine: str = arguments.env_type
    stage = zero_stage(arguments) if engine.startswith("deepspeed") else 0
    if stage:
        engine += f", ZeRO stage {stage}"
    return engine
