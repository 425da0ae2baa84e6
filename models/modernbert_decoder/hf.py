"""Maps each native parameter of ModernBERT's decoder to its tensors in Hugging Face's checkpoints,
for all heads.
"""

from __future__ import annotations

from dataclasses import replace

from ..bert.hf import both
from ..modernbert.hf import LAYER
from ..modernbert.hf import NAME_MAP as ENCODER
from ..name_map import NameEntry

_QKV = "blocks.{i}.attention.qkv"

NAME_MAP = replace(
    ENCODER,
    entries=(
        *(entry for entry in ENCODER.entries if not entry.native.startswith((_QKV, "head."))),
        *(
            NameEntry(f"{_QKV}.{kind}", tuple(f"{LAYER}.attn.{part}_proj.{kind}" for part in "qkv"))
            for kind in ("weight", "bias")
        ),
        *both("head.dense", "lm_head.dense"),
        *both("head.norm", "lm_head.norm"),
        *both("head.decoder", "decoder"),
        *both("transform.dense", "head.dense"),
        *both("transform.norm", "head.norm"),
    ),
)
