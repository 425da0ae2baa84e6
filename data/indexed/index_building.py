"""Choose the compiled index builders where the extension is built, else numpy's; the results are equal."""

from __future__ import annotations

try:
    from .._index import sample_index, sentence_index

    COMPILED = True
except ImportError:
    from .index_reference import sample_index, sentence_index

    COMPILED = False

__all__ = ["COMPILED", "sample_index", "sentence_index"]
