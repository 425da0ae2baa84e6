"""Tells how GGUF files spell Gemma 2.

The divisor of the scores is not in the header. As in llama.cpp, it is the size of a head, but for the
largest model that of an even share of the width.
"""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats.gguf_file import GgufContents
from ..llama.gguf import HEAD_SIZE, SANDWICH_NORMS, gguf

KEYS = {**HEAD_SIZE, "attention.sliding_window": "sliding_window"}
_LARGEST = 46  # layers of Gemma 2 27B


def find_divisor(contents: GgufContents, largest: int) -> dict[str, Any]:
    """Returns `query_pre_attn_scalar`.

    Args:
        contents: What is known of the file.
        largest: The number of layers of the model whose divisor is another.
    """
    divisor = contents.number("attention.key_length", 256)
    heads = contents.number("attention.head_count")
    if contents.number("block_count") == largest and heads:
        divisor = contents.number("embedding_length") // heads
    return {"query_pre_attn_scalar": divisor}


def _find_keys(contents: GgufContents) -> dict[str, Any]:
    return find_divisor(contents, _LARGEST)


GGUF = gguf(
    "gemma2",
    "Gemma2ForCausalLM",
    keys={
        **KEYS,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    block=SANDWICH_NORMS,
    norm_offset=1.0,
    find_keys=_find_keys,
)
