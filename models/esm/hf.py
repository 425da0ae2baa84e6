"""Maps each native parameter of ESM to its tensors in Hugging Face's checkpoints, for all heads."""

from __future__ import annotations

from ..bert.hf import OLD_NORM_NAMES, both, encoder_entries
from ..name_map import NameEntry, NameMap
from ..roberta.hf import NAME_MAP as ROBERTA

_LAYER = "esm.encoder.layer.{i}"
_FREQUENCIES = "rotary_embeddings.inv_freq"
# The norms, whose places differ from RoBERTa's.
_NORMS = {
    "encoder.blocks.{i}.attention_norm": f"{_LAYER}.attention.LayerNorm",
    "encoder.blocks.{i}.mlp_norm": f"{_LAYER}.LayerNorm",
    "encoder.embedding_norm": "esm.embeddings.layer_norm",
    "encoder.final_norm": "esm.encoder.emb_layer_norm_after",
}
_HEADS = ("head.", "pooler.", "classifier.", "token_classifier.")


def _list_entries() -> tuple[NameEntry, ...]:
    entries = [
        entry
        for entry in encoder_entries("esm.")
        if entry.native.rpartition(".")[0] not in _NORMS and "cross_attention" not in entry.native
    ]
    for native, stored in _NORMS.items():
        entries += both(native, stored)
    entries += [entry for entry in ROBERTA.entries if entry.native.startswith(_HEADS)]
    entries += both("encoder_pooler", "esm.pooler.dense")
    entries.append(NameEntry("encoder.frequencies", f"esm.{_FREQUENCIES}"))
    return tuple(entries)


NAME_MAP = NameMap(
    prefix="esm.",
    entries=_list_entries(),
    aliases=(
        ("lm_head.decoder.weight", "esm.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "lm_head.bias"),
    ),
    # Files of transformers 4 have the frequencies of each layer, which are equal. Those that
    # transformers 5 wrote have them of a layer called *.
    renamed=(
        *OLD_NORM_NAMES,
        (
            rf"(?:esm\.)?encoder\.layer\.(?:0|\*)\.attention\.self\.{_FREQUENCIES}",
            f"esm.{_FREQUENCIES}",
        ),
    ),
    ignored=(
        r"(esm\.)?contact_head\.regression\.(weight|bias)",
        rf"(esm\.)?encoder\.layer\.\d+\.attention\.self\.{_FREQUENCIES}",
        r"(esm\.)?embeddings\.position_ids",
    ),
)
