"""Defines mBART's configuration: BART's keys with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..bart.config import BartConfig
from ..config import ClassCount, TokenId


@dataclass
class MBartConfig(BartConfig):
    """The sizes and constants of an mBART.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "mbart"
    pre_norm: ClassVar[bool] = True

    decoder_start_token_id: TokenId | None = None
    num_labels: ClassCount = 2
    architecture: str = "MBartForConditionalGeneration"
