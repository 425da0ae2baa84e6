"""Declares the families that are RoBERTa under another name: the same models and files with other vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..bert.model import BertBody
from ..heads import with_heads
from ..registry import Family
from . import FAMILY as ROBERTA
from .config import RobertaConfig
from .model import HEADS


def sibling(
    prefix: str, config: type[RobertaConfig], presets: Mapping[str, RobertaConfig]
) -> Family:
    """Returns the facts about a family whose architectures have RoBERTa's names with another prefix."""
    return replace(
        ROBERTA,
        config=config,
        architectures=with_heads(BertBody, prefix, HEADS),
        name_map=replace(ROBERTA.name_map, head_first=f"{prefix}ForMaskedLM"),
        presets=presets,
        pretrains={samples: renamed(name, prefix) for samples, name in ROBERTA.pretrains.items()},
    )


def renamed(architecture: str, prefix: str) -> str:
    """Returns the sibling's name of one of RoBERTa's architectures, such as XLMRobertaForMaskedLM."""
    return architecture.replace("Roberta", prefix, 1)
