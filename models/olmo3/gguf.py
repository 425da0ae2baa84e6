"""Tells how GGUF files spell OLMo 3, which have OLMo 2's name and a window."""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats.gguf_file import GgufContents
from ..llama.gguf import SANDWICH_NORMS, gguf

_WINDOW = "attention.sliding_window"


def _find_keys(contents: GgufContents) -> dict[str, Any]:
    """Returns the type of each layer; without an array of them, each fourth one has no window."""
    windows = contents.array(f"{_WINDOW}_pattern")
    if not windows:
        return {}
    return {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows]
    }


def _has_window(contents: GgufContents) -> bool:
    return contents.number(_WINDOW) > 0


GGUF = gguf(
    "olmo2",
    "Olmo3ForCausalLM",
    model_type="olmo3",
    keys={_WINDOW: "sliding_window"},
    block=SANDWICH_NORMS,
    find_keys=_find_keys,
    is_meant=_has_window,
)
