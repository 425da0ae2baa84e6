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


# transformers builds that part of every model, with sizes of its own if a file names none.
_FEW_IMAGES: dict[str, Any] = {
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip


def _pair(**sizes: Any) -> T5Gemma2Config:
    """Returns a model of two stacks of the same sizes, those of a Gemma 3."""
    stack = T5Gemma2TextConfig(vocab_size=262144, **sizes)
    return T5Gemma2Config(vocab_size=262144, encoder=stack, decoder=stack, encoder_settings=_IMAGES)


_SMALL = T5Gemma2TextConfig(
    vocab_size=1100,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    query_pre_attn_scalar=32,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=16,
    max_position_embeddings=512,
)

PRESETS: dict[str, T5Gemma2Config] = {
    # About as many parameters as t5-quickstart, whose recipe it shares.
    "t5gemma2-quickstart": T5Gemma2Config(
        vocab_size=1100, encoder=_SMALL, decoder=_SMALL, encoder_settings=_FEW_IMAGES
    ),
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
