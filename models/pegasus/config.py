"""Defines Pegasus's configuration: BART's keys with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..bart.config import BartConfig
from ..config import ClassCount, TokenId


@dataclass
class PegasusConfig(BartConfig):
    """The sizes and constants of a Pegasus.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "pegasus"
    pre_norm: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    learned_positions: ClassVar[bool] = False
    positions_count_padding: ClassVar[bool] = True

    pad_token_id: TokenId | None = 0
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = 1
    decoder_start_token_id: TokenId | None = 0
    forced_eos_token_id: TokenId | list[TokenId] | None = 1
    num_labels: ClassCount = 2
    architecture: str = "PegasusForConditionalGeneration"
