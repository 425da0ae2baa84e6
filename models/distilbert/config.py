"""Defines DistilBERT's configuration, which has its own keys in Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ..bert.config import BertConfig
from ..config import LayerCount, Probability

# DistilBERT's keys, and BERT's for the same settings. transformers reads a file's `hidden_size`,
# `num_attention_heads` and `num_hidden_layers` too, and of the other settings only DistilBERT's key.
KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
COMMON_NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
# Settings of BERT that DistilBERT does not have: files do not change them.
CONSTANTS = (
    "layer_norm_eps",
    "type_vocab_size",
    "classifier_dropout",
    "add_pooling_layer",
    "position_embedding_type",
)


@dataclass
class DistilBertConfig(BertConfig):
    """The sizes and constants of a DistilBERT. Meanings and defaults are those of transformers.

    The names are BERT's, so that its encoder reads them; files have DistilBERT's (`dim`).
    """

    model_type: ClassVar[str] = "distilbert"
    attribute_map: ClassVar[dict[str, str]] = KEYS

    num_hidden_layers: LayerCount = 6
    qa_dropout: Probability = 0.1
    seq_classif_dropout: Probability = 0.2
    architecture: str = "DistilBertForMaskedLM"

    @property
    def has_segments(self) -> bool:
        return False

    @property
    def classifier_dropout_prob(self) -> float:
        return self.hidden_dropout_prob

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        for name in (*CONSTANTS, "is_decoder", "add_cross_attention"):
            values.pop(name, None)
        for key, own in KEYS.items():
            if own not in COMMON_NAMES:
                values.pop(own, None)
            if key in values:
                values.setdefault(own, values[key])
                del values[key]
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        for key, own in KEYS.items():
            values[key] = values.pop(own)
        return {key: value for key, value in values.items() if key not in CONSTANTS}
