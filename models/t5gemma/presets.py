"""Lists the released sizes of T5Gemma under Hugging Face's names."""

from __future__ import annotations

from typing import Any

from .config import T5GemmaConfig, T5GemmaModuleConfig

# Those of Gemma 2.
_2B: dict[str, Any] = {}
_9B: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8,
}  # fmt: skip


def _small(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """Returns the sizes of a stack of a T5 1.1, with its heads."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": 64, "query_pre_attn_scalar": 64,
    }  # fmt: skip


_S = _small(512, 1024, 8, 8)
_B = _small(768, 2048, 12, 12)
_L = _small(1024, 2816, 24, 16)
_XL = _small(2048, 5120, 24, 32)


def _pair(encoder: dict[str, Any], decoder: dict[str, Any]) -> T5GemmaConfig:
    return T5GemmaConfig(
        encoder=T5GemmaModuleConfig(**encoder), decoder=T5GemmaModuleConfig(**decoder)
    )


PRESETS: dict[str, T5GemmaConfig] = {
    "t5gemma-s-s-ul2": _pair(_S, _S),
    "t5gemma-b-b-ul2": _pair(_B, _B),
    "t5gemma-l-l-ul2": _pair(_L, _L),
    "t5gemma-xl-xl-ul2": _pair(_XL, _XL),
    "t5gemma-2b-2b-ul2": _pair(_2B, _2B),
    "t5gemma-9b-2b-ul2": _pair(_9B, _2B),
    "t5gemma-9b-9b-ul2": _pair(_9B, _9B),
}
