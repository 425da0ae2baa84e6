"""M2M100 (Fan et al., 2020, "Beyond English-Centric Multilingual Machine Translation") and NLLB (NLLB Team, 2022).

They are BARTs with pre-LayerNorm and sinusoidal positions; see `models/bart/model.py`.
"""

from __future__ import annotations

from ..heads import BareModel
from ..seq2seq import Seq2SeqLM

HEADS = {"ForConditionalGeneration": Seq2SeqLM, "Model": BareModel}
