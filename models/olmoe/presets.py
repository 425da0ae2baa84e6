"""Lists the released sizes of OLMoE under Hugging Face's names."""

from __future__ import annotations

from .config import OlmoeConfig

PRESETS: dict[str, OlmoeConfig] = {"olmoe-1b-7b-0924": OlmoeConfig(intermediate_size=1024)}
