"""Marian's translation models (Junczys-Dowmunt et al., 2018, "Marian: Fast Neural Machine
Translation in C++"), of which OPUS-MT has more than a thousand.

They are BARTs with sinusoidal positions and without a norm of the embeddings; see
`models/bart/model.py`.
"""

from __future__ import annotations

from ..bart.decoder import BartForCausalLM
from ..bart.model import BartBackbone, BartEncoderBackbone, BartLM
from ..generation.mixin import GenerationMixin
from ..heads import BareModel


class MarianMTModel(BartLM, BartBackbone, GenerationMixin):
    """Marian that translates a text."""


class MarianModel(BareModel, BartBackbone):
    """Marian without a head."""


class MarianForCausalLM(BartForCausalLM, GenerationMixin):
    """The decoder of Marian, predicting the next token."""


class MarianEncoder(BareModel, BartEncoderBackbone):
    """The encoder of Marian without a head."""
