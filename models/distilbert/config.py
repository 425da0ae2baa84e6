"""Defines DistilBERT's configuration, which has its own keys in Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ..bert.config import BertConfig
from ..config import LayerCount, Probability

KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
CONSTANTS = (
    "layer_norm_eps",
    "type_vocab_size",
    "classifier_dropout",
    "add_pooling_layer",
    "position_embedding_type",
)


@dataclass(frozen=True)
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
        return super().from_dict(
            values | {own: values[key] for key, own in KEYS.items() if key in values}
        )

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values |= {key: values.pop(own) for key, own in KEYS.items()}
        return {key: value for key, value in values.items() if key not in CONSTANTS}
