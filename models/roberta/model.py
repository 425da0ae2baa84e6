"""RoBERTa (Liu et al., 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

BERT, except that
- positions count the tokens that are not padding, from the padding token's id on
- there is no next-sentence prediction, so the first token's state is not pooled in pretraining
- the classifier drops out its input too; its dense layer takes the pooler's place
- the activation in the masked-language-model head is the exact GELU, whatever `hidden_act` is
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
        """The first token's state [B, H] -> [B, num_labels]"""
        return super().classify(self.input_dropout(first))
