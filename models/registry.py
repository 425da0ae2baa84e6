"""Lists the model families. A new family is added to `_FAMILIES`."""

from __future__ import annotations

from . import (
    bart,
    bert,
    camembert,
    distilbert,
    electra,
    eurobert,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    llama,
    m2m_100,
    marian,
    mbart,
    mistral,
    mixtral,
    modernbert,
    mt5,
    nllb_moe,
    olmoe,
    pegasus,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    roberta,
    smollm3,
    switch_transformers,
    t5,
    umt5,
    xlm_roberta,
    xlm_roberta_xl,
)
from .family_table import add_family, architectures, family, find_family, presets

_FAMILIES = (
    bart.FAMILY,
    bert.FAMILY,
    camembert.FAMILY,
    distilbert.FAMILY,
    electra.FAMILY,
    eurobert.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    gpt2.FAMILY,
    gpt_oss.FAMILY,
    granite.FAMILY,
    llama.FAMILY,
    m2m_100.FAMILY,
    marian.FAMILY,
    mbart.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    modernbert.FAMILY,
    mt5.FAMILY,
    nllb_moe.FAMILY,
    olmoe.FAMILY,
    pegasus.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    roberta.FAMILY,
    smollm3.FAMILY,
    switch_transformers.FAMILY,
    t5.FAMILY,
    umt5.FAMILY,
    xlm_roberta.FAMILY,
    xlm_roberta_xl.FAMILY,
)
for facts in _FAMILIES:
    add_family(facts)

FAMILIES = tuple(facts.config.model_type for facts in _FAMILIES)
"""The `model_type` of each family."""

__all__ = ["FAMILIES", "architectures", "family", "find_family", "presets"]
