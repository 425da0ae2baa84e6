"""Tells how GGUF files spell Gemma."""

from __future__ import annotations

from ..llama.gguf import HEAD_SIZE, gguf

GGUF = gguf("gemma", "GemmaForCausalLM", keys=HEAD_SIZE, norm_offset=1.0)
