"""Tells how GGUF files spell Gemma 3's decoder."""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats.gguf_file import GgufContents
from ..gemma2.gguf import KEYS, find_divisor
from ..llama.gguf import SANDWICH_NORMS, gguf

_LARGEST = 62  # layers of Gemma 3 27B


def _find_keys(contents: GgufContents) -> dict[str, Any]:
    found = find_divisor(contents, _LARGEST)
    if "attention.sliding_window" not in contents.values:
        found["sliding_window_pattern"] = 1
    return found


GGUF = gguf(
    "gemma3",
    "Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys={
        **KEYS,
        "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    block=SANDWICH_NORMS,
    norm_offset=1.0,
    find_keys=_find_keys,
)
