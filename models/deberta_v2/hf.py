"""Maps each native parameter of DeBERTa-v2 to its tensors in Hugging Face's checkpoints, for all
heads.
"""

from __future__ import annotations

from ..bert.hf import OLD_NORM_NAMES, both
from ..name_map import NameEntry, NameMap

_LAYER = "deberta.encoder.layer.{i}"
_BLOCK = "encoder.blocks.{i}"
_EMBEDDINGS = "deberta.embeddings"
_SELF = f"{_LAYER}.attention.self"

NAME_MAP = NameMap(
    prefix="deberta.",
    entries=(
        NameEntry("encoder.word_embeddings.weight", f"{_EMBEDDINGS}.word_embeddings.weight"),
        NameEntry(
            "encoder.position_embeddings.weight", f"{_EMBEDDINGS}.position_embeddings.weight"
        ),
        NameEntry(
            "encoder.token_type_embeddings.weight", f"{_EMBEDDINGS}.token_type_embeddings.weight"
        ),
        *both("encoder.embedding_norm", f"{_EMBEDDINGS}.LayerNorm"),
        NameEntry("encoder.relative_embeddings", "deberta.encoder.rel_embeddings.weight"),
        *both("encoder.relative_norm", "deberta.encoder.LayerNorm"),
        *(
            NameEntry(
                f"{_BLOCK}.attention.qkv.{kind}",
                tuple(f"{_SELF}.{part}_proj.{kind}" for part in ("query", "key", "value")),
            )
            for kind in ("weight", "bias")
        ),
        *both(f"{_BLOCK}.attention.position_key", f"{_SELF}.pos_key_proj"),
        *both(f"{_BLOCK}.attention.position_query", f"{_SELF}.pos_query_proj"),
        *both(f"{_BLOCK}.attention.output", f"{_LAYER}.attention.output.dense"),
        *both(f"{_BLOCK}.attention_norm", f"{_LAYER}.attention.output.LayerNorm"),
        *both(f"{_BLOCK}.mlp.up", f"{_LAYER}.intermediate.dense"),
        *both(f"{_BLOCK}.mlp.down", f"{_LAYER}.output.dense"),
        *both(f"{_BLOCK}.mlp_norm", f"{_LAYER}.output.LayerNorm"),
        *both("head.dense", "cls.predictions.transform.dense"),
        *both("head.norm", "cls.predictions.transform.LayerNorm"),
        NameEntry("head.decoder.weight", "cls.predictions.decoder.weight"),
        NameEntry("head.decoder.bias", "cls.predictions.bias"),
        *both("pooler", "pooler.dense"),
        *both("classifier", "classifier"),
        *both("token_classifier", "classifier"),
        *both("choice_classifier", "classifier"),
        *both("qa_outputs", "qa_outputs"),
    ),
    aliases=(
        ("cls.predictions.decoder.weight", f"{_EMBEDDINGS}.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    renamed=OLD_NORM_NAMES,
    ignored=(r"(deberta\.)?embeddings\.position_ids",),
)
