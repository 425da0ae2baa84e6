"""Tells how GGUF files spell OLMo 2."""

from __future__ import annotations

from ..llama.gguf import SANDWICH_NORMS, gguf

GGUF = gguf("olmo2", "Olmo2ForCausalLM", block=SANDWICH_NORMS)
