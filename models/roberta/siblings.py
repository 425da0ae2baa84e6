"""Declares the families that are RoBERTa under another name: the same models and files with other vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..registry import Family
from . import FAMILY as ROBERTA
from .config import RobertaConfig


def sibling(prefix: str, config: type[RobertaConfig], presets: Mapping[str, RobertaConfig]) -> Family:
    """Returns the facts about a family whose architectures have RoBERTa's names with another prefix."""
    return replace(
        ROBERTA,
        config=config,
        architectures={renamed(name, prefix): model for name, model in ROBERTA.architectures.items()},
        presets=presets,
        pretrains={samples: renamed(name, prefix) for samples, name in ROBERTA.pretrains.items()},
        tasks={task: renamed(name, prefix) for task, name in ROBERTA.tasks.items()},
    )


def renamed(architecture: str, prefix: str) -> str:
    """Returns the sibling's name of one of RoBERTa's architectures, such as XLMRobertaForMaskedLM."""
    return architecture.replace("Roberta", prefix, 1)
