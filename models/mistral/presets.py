"""Lists the released sizes of Mistral under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import MistralConfig

_7b = partial(MistralConfig, max_position_embeddings=32768, rms_norm_eps=1e-5)

PRESETS: dict[str, MistralConfig] = {
    "mistral-7b-v0.1": _7b(),
    "mistral-7b-v0.3": _7b(
        vocab_size=32768, sliding_window=None, rope_parameters={"rope_theta": 1e6}
    ),
}
