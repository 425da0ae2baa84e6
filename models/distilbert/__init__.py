"""DistilBERT (Sanh et al., 2019): BERT without segments and pooler, and with its own names for everything."""

from ..bert.memory import activations
from ..bert.model import BertBody
from ..heads import (
    BareModel,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    configured,
    with_heads,
)
from ..language_model import MaskedLM
from ..registry import Family
from .config import DistilBertConfig
from .hf import NAME_MAP
from .presets import PRESETS

POOLED = {
    "dense_name": "pre_classifier",
    "activation": "relu",
    "dropout_rate": "seq_classif_dropout",
}
HEADS = {
    "Model": BareModel,
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": configured(SequenceClassification, **POOLED),
    "ForTokenClassification": TokenClassification,
    "ForQuestionAnswering": configured(QuestionAnswering, dropout_rate="qa_dropout"),
    "ForMultipleChoice": configured(MultipleChoice, **POOLED),
}
FAMILY = Family(
    config=DistilBertConfig,
    architectures=with_heads(BertBody, "DistilBert", HEADS),
    name_map=NAME_MAP,
    presets=PRESETS,
    kind="encoder",
    objective="roberta",
    pretrains={"masked": "DistilBertForMaskedLM"},
    tokenizer="wordpiece",
    activations=activations,
)

__all__ = ["FAMILY", "DistilBertConfig"]
