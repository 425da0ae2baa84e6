"""Lists the released sizes of GLM-4-0414 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import Glm4Config

_glm4 = partial(
    Glm4Config,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    eos_token_id=[151329, 151336, 151338],
)

PRESETS: dict[str, Glm4Config] = {
    "glm-4-9b-0414": _glm4(),
    "glm-4-32b-0414": _glm4(
        hidden_size=6144,
        intermediate_size=23040,
        num_hidden_layers=61,
        num_attention_heads=48,
        attention_bias=False,
    ),
}
