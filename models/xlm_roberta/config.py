"""Defines XLM-RoBERTa's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import VocabSize
from ..roberta.config import RobertaConfig


@dataclass
class XLMRobertaConfig(RobertaConfig):
    """The sizes and constants of an XLM-RoBERTa.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "xlm-roberta"

    vocab_size: VocabSize = 30522
    architecture: str = "XLMRobertaForMaskedLM"
