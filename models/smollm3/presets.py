"""Lists the released size of SmolLM3 under Hugging Face's name."""

from __future__ import annotations

from .config import SmolLM3Config

PRESETS: dict[str, SmolLM3Config] = {
    "smollm3-3b": SmolLM3Config(
        max_position_embeddings=65536,
        rope_parameters={"rope_theta": 5000000.0},
        bos_token_id=None,
        eos_token_id=128012,
    )
}
