"""Pegasus (Zhang et al., 2020, "PEGASUS: Pre-training with Extracted Gap-sentences for Abstractive
Summarization").

It is a BART with pre-LayerNorm and sinusoidal positions; see `models/bart/model.py`.
"""

from __future__ import annotations

from ..bart.decoder import BartForCausalLM
from ..bart.model import BartBackbone, BartEncoderBackbone, BartLM
from ..generation.mixin import GenerationMixin
from ..heads import BareModel


class PegasusForConditionalGeneration(BartLM, BartBackbone, GenerationMixin):
    """Pegasus that answers a text with another one."""


class PegasusModel(BareModel, BartBackbone):
    """Pegasus without a head."""


class PegasusForCausalLM(BartForCausalLM, GenerationMixin):
    """The decoder of Pegasus, predicting the next token."""


class PegasusEncoder(BareModel, BartEncoderBackbone):
    """The encoder of Pegasus without a head."""
