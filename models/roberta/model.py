"""RoBERTa (Liu et al., 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

RoBERTa is BERT with these differences:
- positions count the tokens that are not padding, starting after the padding token's id
- there is no next-sentence prediction, so pretraining does not pool the first token's state
- the classifier also applies dropout to its input; its dense layer replaces the pooler
- the masked-language-model head always uses the exact GELU, independent of `hidden_act`
"""

from __future__ import annotations

from torch import Tensor

from ...mpu import Dropout, ParallelMesh
from ..bert.model import BertForMaskedLM, BertForSequenceClassification
from ..common.parallel_config import ParallelConfig
from .config import RobertaConfig


class RobertaForMaskedLM(BertForMaskedLM):
    """Predicts the masked tokens."""


class RobertaForSequenceClassification(BertForSequenceClassification):
    """A two-layer classifier on the first token's state."""

    def __init__(
        self, config: RobertaConfig, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.input_dropout = Dropout(config.classifier_dropout_prob)

    def classify(self, first: Tensor) -> Tensor:
        """Returns the logits [B, num_labels] of the first token's hidden state [B, H]."""
        return super().classify(self.input_dropout(first))
