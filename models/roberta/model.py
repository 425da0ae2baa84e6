"""RoBERTa (Liu et al., 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

RoBERTa is BERT with these differences:
- positions count the tokens that are not padding, starting after the padding token's id
- there is no next-sentence prediction, so pretraining does not pool the first token's state
- the sequence classifier also applies dropout to its input; its dense layer replaces the pooler, as `pooler`; the
  pooler of the other heads is `encoder_pooler`
- the masked-language-model head always uses the exact GELU, independent of `hidden_act`
"""

from __future__ import annotations

from ..heads import (
    BareModel,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    configured,
)
from ..language_model import MaskedLM

HEADS = {
    "Model": configured(BareModel, pooler_name="encoder_pooler"),
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": configured(
        SequenceClassification, dense_name="pooler", drops_input=True
    ),
    "ForTokenClassification": TokenClassification,
    "ForMultipleChoice": configured(
        MultipleChoice, dense_name="encoder_pooler", dropout_rate="hidden_dropout_prob"
    ),
    "ForQuestionAnswering": QuestionAnswering,
}
