"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with stacked projections in its files and residual dropout."""

from ..family import Family, by_name
from ..llama.gguf import gguf
from .config import Phi3Config
from .hf import NAME_MAP
from .memory import activations
from .model import (
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    Phi3ForTokenClassification,
    Phi3Model,
)
from .presets import PRESETS

FAMILY = Family(
    config=Phi3Config,
    architectures=by_name(
        Phi3ForCausalLM, Phi3Model, Phi3ForSequenceClassification, Phi3ForTokenClassification
    ),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Phi3ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[
        gguf(
            "phi3",
            "Phi3ForCausalLM",
            keys={"attention.sliding_window": "sliding_window"},
            block={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        )
    ],
    tasks={"text-generation": "Phi3ForCausalLM", "text2text-generation": "Phi3ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Phi3Config",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    "Phi3ForTokenClassification",
    "Phi3Model",
]
