"""Lists the released sizes of T5Gemma 2 under Hugging Face's names."""

from __future__ import annotations

from typing import Any

from .config import T5Gemma2Config, T5Gemma2TextConfig

# The part that reads images is Gemma 3's.
_IMAGES: dict[str, Any] = {
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
    "mm_tokens_per_image": 256,
}  # fmt: skip


def _pair(**sizes: Any) -> T5Gemma2Config:
    """Returns a model of two stacks of the same sizes, those of a Gemma 3."""
    stack = T5Gemma2TextConfig(vocab_size=262144, **sizes)
    return T5Gemma2Config(vocab_size=262144, encoder=stack, decoder=stack, encoder_settings=_IMAGES)


PRESETS: dict[str, T5Gemma2Config] = {
    "t5gemma-2-270m-270m": _pair(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
    ),
    "t5gemma-2-1b-1b": _pair(
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
    ),
    "t5gemma-2-4b-4b": _pair(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        sliding_window=1024,
        rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    ),
}
