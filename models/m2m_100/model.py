"""M2M100 (Fan et al., 2020, "Beyond English-Centric Multilingual Machine Translation") and NLLB
(NLLB Team, 2022).

They are BARTs with pre-LayerNorm and sinusoidal positions; see `models/bart/model.py`.
"""

from __future__ import annotations

from ..bart.model import BartBackbone, BartEncoderBackbone
from ..generation.mixin import GenerationMixin
from ..heads import BareModel
from ..seq2seq import Seq2SeqLM


class M2M100ForConditionalGeneration(Seq2SeqLM, BartBackbone, GenerationMixin):
    """M2M100 that answers a text with another one."""


class M2M100Model(BareModel, BartBackbone):
    """M2M100 without a head."""


class M2M100Encoder(BareModel, BartEncoderBackbone):
    """The encoder of M2M100 without a head."""
