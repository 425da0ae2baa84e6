"""mBART (Liu et al., 2020, "Multilingual Denoising Pre-training for Neural Machine Translation").

It is BART with pre-LayerNorm. A text ends with the code of its language, with which its decoding
begins.
"""

from __future__ import annotations

from torch import Tensor

from ..bart.decoder import BartForCausalLM
from ..bart.model import BartBackbone, BartEncoderBackbone, BartLM
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, QuestionAnswering, SequenceClassification
from ..language_model import IGNORED
from ..seq2seq import SEQ2SEQ_INPUTS


class MBartBackbone(BartBackbone):
    """BART's stacks with an `MBartConfig`."""

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns int64 [B, T]: each row's last token, which is a language code, then the labels
        but the last.
        """
        pad_token_id = self.find_padding_of_labels()
        ids = labels.masked_fill(labels == IGNORED, pad_token_id)
        last = (ids != pad_token_id).sum(1, keepdim=True) - 1  # padding is on the right
        start = ids.gather(1, last.clamp(min=0))
        ids = ids.roll(1, dims=1)
        ids[:, :1] = start
        return ids


class MBartForConditionalGeneration(BartLM, MBartBackbone, GenerationMixin):
    """mBART that answers a text with another one."""


class MBartModel(BareModel, MBartBackbone):
    """mBART without a head."""


class MBartForSequenceClassification(SequenceClassification, MBartBackbone):
    """mBART that classifies a text."""

    positional_inputs = (*SEQ2SEQ_INPUTS, "inputs_embeds", "decoder_inputs_embeds")
    pooling = "eos"
    dense_name = "pooler"
    dropout_rate = "classifier_dropout"
    drops_input = True


class MBartForQuestionAnswering(QuestionAnswering, MBartBackbone):
    """mBART that finds the first and the last token of an answer."""

    positional_inputs = SEQ2SEQ_INPUTS


class MBartForCausalLM(BartForCausalLM, GenerationMixin):
    """The decoder of mBART, predicting the next token."""


class MBartEncoder(BareModel, BartEncoderBackbone):
    """The encoder of mBART without a head."""
