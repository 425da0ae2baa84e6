"""Defines M2M100's configuration, which NLLB shares: BART's keys with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..bart.config import BartConfig
from ..config import Activation, ClassCount, Probability, TokenId, VocabSize


@dataclass
class M2M100Config(BartConfig):
    """The sizes and constants of an M2M100.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "m2m_100"
    pre_norm: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    learned_positions: ClassVar[bool] = False
    has_logits_bias: ClassVar[bool] = False

    vocab_size: VocabSize = 128112
    encoder_layerdrop: Probability = 0.05
    decoder_layerdrop: Probability = 0.05
    activation_function: Activation = "relu"
    attention_dropout: Probability = 0.1
    scale_embedding: bool = True
    forced_eos_token_id: TokenId | list[TokenId] | None = None
    num_labels: ClassCount = 2
    architecture: str = "M2M100ForConditionalGeneration"
