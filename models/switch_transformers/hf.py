"""Maps each native parameter of a Switch Transformer to its tensors in Hugging Face's checkpoints.

The names are T5's, but for the feed-forward parts. A file has two matrices of each expert.
"""

from __future__ import annotations

from dataclasses import replace

from ..name_map import NameEntry, NameMap
from ..t5.hf import NAME_MAP as T5_NAME_MAP


def _list_feed_forward(stack: str, part: int) -> tuple[NameEntry, ...]:
    """Returns the entries of the feed-forward parts of a stack.

    Args:
        part: The number of the feed-forward part in a stored layer.
    """
    native = f"{stack}.blocks.{{i}}.mlp"
    stored = f"{stack}.block.{{i}}.layer.{part}.mlp"
    expert = f"{stored}.experts.expert_{{e}}"
    return (
        NameEntry(f"{native}.up.weight", f"{stored}.wi.weight"),
        NameEntry(f"{native}.down.weight", f"{stored}.wo.weight"),
        NameEntry(f"{native}.router.weight", f"{stored}.router.classifier.weight"),
        NameEntry(f"{native}.router.bias", f"{stored}.router.classifier.bias"),
        NameEntry(f"{native}.experts.up", (f"{expert}.wi.weight",)),
        NameEntry(f"{native}.experts.down", (f"{expert}.wo.weight",), transpose=True),
    )


NAME_MAP: NameMap = replace(
    T5_NAME_MAP,
    entries=(
        *(entry for entry in T5_NAME_MAP.entries if ".mlp." not in entry.native),
        *_list_feed_forward("encoder", 1),
        *_list_feed_forward("decoder", 2),
    ),
    spelled=(),
)
