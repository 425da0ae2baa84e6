"""Defines UMT5's configuration: T5's keys with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import HeadCount, InnerSize, LayerCount, VocabSize
from ..t5.config import T5Config


@dataclass
class UMT5Config(T5Config):
    """The sizes and constants of a UMT5. Names, meanings and defaults are those of transformers.

    As published, the head is a separate matrix and its input is not scaled. transformers 5 scales
    the head's input of every UMT5, whatever `tie_word_embeddings` says; it also writes true into
    every file. Of such a file the zoo computes what transformers does.
    """

    model_type: ClassVar[str] = "umt5"
    shares_relative_bias: ClassVar[bool] = False

    vocab_size: VocabSize = 250112
    d_ff: InnerSize = 1024
    num_layers: LayerCount = 8
    num_heads: HeadCount = 6
    feed_forward_proj: str = "gated-gelu"
    architecture: str = "UMT5ForConditionalGeneration"
