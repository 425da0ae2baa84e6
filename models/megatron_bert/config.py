"""Defines Megatron-BERT's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..bert.config import BertConfig
from ..config import HeadCount, HiddenSize, InnerSize, LayerCount, VocabSize


@dataclass
class MegatronBertConfig(BertConfig):
    """The sizes and constants of a Megatron-BERT.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "megatron-bert"

    vocab_size: VocabSize = 29056
    hidden_size: HiddenSize = 1024
    num_hidden_layers: LayerCount = 24
    num_attention_heads: HeadCount = 16
    intermediate_size: InnerSize = 4096
    architecture: str = "MegatronBertForMaskedLM"

    @property
    def classifier_dropout_prob(self) -> float:
        """The rate before a classifier, which has no key of its own."""
        return self.hidden_dropout_prob

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values.pop("classifier_dropout", None)  # which transformers' Megatron-BERT does not have
        return values
