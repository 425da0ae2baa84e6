"""Lists the released sizes of Ettin's decoders under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from ..blocks.rotary import RopeParameters
from .config import ModernBertDecoderConfig

_ROPE: RopeParameters = {"rope_type": "default", "rope_theta": 160000.0}
_ettin = partial(
    ModernBertDecoderConfig, rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE}
)

PRESETS: dict[str, ModernBertDecoderConfig] = {
    "ettin-decoder-17m": _ettin(
        hidden_size=256, num_hidden_layers=7, num_attention_heads=4, intermediate_size=384
    ),
    "ettin-decoder-32m": _ettin(
        hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=576
    ),
    "ettin-decoder-68m": _ettin(
        hidden_size=512, num_hidden_layers=19, num_attention_heads=8, intermediate_size=768
    ),
    "ettin-decoder-150m": _ettin(),
    "ettin-decoder-400m": _ettin(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624
    ),
    "ettin-decoder-1b": _ettin(
        hidden_size=1792, num_hidden_layers=28, num_attention_heads=28, intermediate_size=3840
    ),
}
