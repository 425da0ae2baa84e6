"""Choose the compiled index builders where the extension is built, else numpy's; the results are equal."""

from __future__ import annotations

from . import index_reference

try:
    from .. import _index as builders  # type: ignore[attr-defined]

    COMPILED = True
except ImportError:
    builders = index_reference
    COMPILED = False

sample_index = builders.sample_index
sentence_index = builders.sentence_index
