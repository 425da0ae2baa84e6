"""Lists the released sizes of Llama 2 and 3 under Hugging Face's names, and a model for two CPU
cores.
"""

from __future__ import annotations

from functools import partial

from ..blocks.rotary import RopeParameters
from .config import LlamaConfig

_llama2 = partial(LlamaConfig, max_position_embeddings=4096, rms_norm_eps=1e-5)
_llama3 = partial(
    LlamaConfig,
    vocab_size=128256,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    bos_token_id=128000,
    eos_token_id=128001,
)


def _scaled(factor: float) -> RopeParameters:
    return {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


_70b = partial(
    _llama3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
)
_8b = partial(_llama3, intermediate_size=14336)
_THETA: RopeParameters = {"rope_theta": 500000.0}
_small = partial(
    _llama3,
    intermediate_size=8192,
    max_position_embeddings=131072,
    rope_parameters=_scaled(32.0),
    tie_word_embeddings=True,
)

PRESETS: dict[str, LlamaConfig] = {
    "llama-2-7b": _llama2(),
    "llama-2-13b": _llama2(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
    ),
    "llama-2-70b": _llama2(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "meta-llama-3-8b": _8b(max_position_embeddings=8192, rope_parameters=_THETA),
    "meta-llama-3-70b": _70b(max_position_embeddings=8192, rope_parameters=_THETA),
    "llama-3.1-8b": _8b(max_position_embeddings=131072, rope_parameters=_scaled(8.0)),
    "llama-3.1-70b": _70b(max_position_embeddings=131072, rope_parameters=_scaled(8.0)),
    "llama-3.2-1b": _small(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32),
    "llama-3.2-3b": _small(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24),
    "llama-quickstart": LlamaConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    ),
}
