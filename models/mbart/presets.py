"""Lists the released sizes of mBART under Hugging Face's names."""

from __future__ import annotations

from .config import MBartConfig

PRESETS: dict[str, MBartConfig] = {
    "mbart-large-cc25": MBartConfig(vocab_size=250027, scale_embedding=True),
    "mbart-large-50": MBartConfig(vocab_size=250054, scale_embedding=True),
}
