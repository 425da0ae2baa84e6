"""Maps each native parameter of an NLLB-MoE to its tensors in Hugging Face's checkpoints.

The names are BART's, but for the feed-forward parts and the attention to the encoder.
"""

from __future__ import annotations

from dataclasses import replace

from ..bart.hf import NAME_MAP as BART_NAME_MAP
from ..bart.hf import both
from ..name_map import NameEntry, NameMap


def _list_feed_forward(stack: str) -> tuple[NameEntry, ...]:
    """Returns the entries of the feed-forward parts of a stack."""
    native = f"{stack}.blocks.{{i}}"
    stored = f"model.{stack}.layers.{{i}}"
    expert = f"{stored}.ffn.experts.expert_{{e}}"
    return (
        *both(f"{native}.mlp.up", f"{stored}.ffn.fc1"),
        *both(f"{native}.mlp.down", f"{stored}.ffn.fc2"),
        *both(f"{native}.mlp_norm", f"{stored}.ff_layer_norm"),
        *both(f"{native}.mlp.router", f"{stored}.ffn.router.classifier"),
        NameEntry(f"{native}.mlp.experts.up", (f"{expert}.fc1.weight",)),
        NameEntry(f"{native}.mlp.experts.up_bias", (f"{expert}.fc1.bias",)),
        NameEntry(f"{native}.mlp.experts.down", (f"{expert}.fc2.weight",), transpose=True),
        NameEntry(f"{native}.mlp.experts.down_bias", (f"{expert}.fc2.bias",)),
    )


def _rename_cross_attention(entry: NameEntry) -> NameEntry:
    """Returns an entry of BART with NLLB-MoE's name of the attention to the encoder."""
    stored = tuple(
        name.replace(".encoder_attn", ".cross_attention") for name in entry.stored_names()
    )
    return replace(entry, stored=stored)


NAME_MAP: NameMap = replace(
    BART_NAME_MAP,
    entries=(
        *(
            _rename_cross_attention(entry)
            for entry in BART_NAME_MAP.entries
            if ".mlp" not in entry.native
        ),
        *_list_feed_forward("encoder"),
        *_list_feed_forward("decoder"),
    ),
)
