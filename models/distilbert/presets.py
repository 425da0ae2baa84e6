"""Lists the released DistilBERT sizes under Hugging Face's names."""

from __future__ import annotations

from .config import DistilBertConfig

_BASE = DistilBertConfig()

PRESETS: dict[str, DistilBertConfig] = {
    "distilbert-base-uncased": _BASE,
    "distilbert-base-cased": _BASE.with_changes(vocab_size=28996),
    "distilbert-base-multilingual-cased": _BASE.with_changes(vocab_size=119547),
}
