"""OLMo 2 (2024): Llama with norms after attention and MLP, and of all heads' queries and keys."""

from ..family import Family, by_name
from ..llama.memory import activations
from .config import Olmo2Config
from .gguf import GGUF
from .hf import NAME_MAP
from .model import Olmo2ForCausalLM, Olmo2ForSequenceClassification, Olmo2Model
from .presets import PRESETS

FAMILY = Family(
    config=Olmo2Config,
    architectures=by_name(Olmo2ForCausalLM, Olmo2Model, Olmo2ForSequenceClassification),
    presets=PRESETS,
    name_map=NAME_MAP,
    kind="decoder",
    objective="gpt",
    pretrains={"causal": "Olmo2ForCausalLM"},
    tokenizer="bpe",
    activations=activations,
    gguf=[GGUF],
    tasks={"text-generation": "Olmo2ForCausalLM", "text2text-generation": "Olmo2ForCausalLM"},
)

__all__ = [
    "FAMILY",
    "Olmo2Config",
    "Olmo2ForCausalLM",
    "Olmo2ForSequenceClassification",
    "Olmo2Model",
]
