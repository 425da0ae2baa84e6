"""Maps each native parameter of EuroBERT to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from dataclasses import replace

from ..llama.hf import NAME_MAP as LLAMA
from ..name_map import NameEntry

_OF_LLAMA = ("head.", "classifier.", "qa_outputs.")
_HEADS = (("head.decoder", "lm_head"), ("dense", "dense"), ("classifier", "classifier"))
_TOKENS = ("token_classifier", "classifier")

NAME_MAP = replace(
    LLAMA,
    entries=(
        *(entry for entry in LLAMA.entries if not entry.native.startswith(_OF_LLAMA)),
        *(
            NameEntry(f"{native}.{kind}", f"{stored}.{kind}")
            for native, stored in (*_HEADS, _TOKENS)
            for kind in ("weight", "bias")
        ),
    ),
    renamed=(),
    spelled=(),
)
