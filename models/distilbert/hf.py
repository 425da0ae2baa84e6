"""Maps each native parameter of DistilBERT to its tensors in Hugging Face's checkpoints, for all
heads.
"""

from __future__ import annotations

from ..bert.hf import both
from ..name_map import NameEntry, NameMap

LAYER = "distilbert.transformer.layer.{i}"
BLOCK = "encoder.blocks.{i}"

NAME_MAP = NameMap(
    prefix="distilbert.",
    entries=(
        NameEntry("encoder.word_embeddings.weight", "distilbert.embeddings.word_embeddings.weight"),
        NameEntry(
            "encoder.position_embeddings.weight", "distilbert.embeddings.position_embeddings.weight"
        ),
        *both("encoder.embedding_norm", "distilbert.embeddings.LayerNorm"),
        *(
            NameEntry(
                f"{BLOCK}.attention.qkv.{kind}",
                tuple(f"{LAYER}.attention.{x}_lin.{kind}" for x in "qkv"),
            )
            for kind in ("weight", "bias")
        ),
        *both(f"{BLOCK}.attention.output", f"{LAYER}.attention.out_lin"),
        *both(f"{BLOCK}.attention_norm", f"{LAYER}.sa_layer_norm"),
        *both(f"{BLOCK}.mlp.up", f"{LAYER}.ffn.lin1"),
        *both(f"{BLOCK}.mlp.down", f"{LAYER}.ffn.lin2"),
        *both(f"{BLOCK}.mlp_norm", f"{LAYER}.output_layer_norm"),
        *both("head.dense", "vocab_transform"),
        *both("head.norm", "vocab_layer_norm"),
        NameEntry("head.decoder.weight", "vocab_projector.weight"),
        NameEntry("head.decoder.bias", "vocab_projector.bias"),
        *both("pre_classifier", "pre_classifier"),
        *both("classifier", "classifier"),
        *both("token_classifier", "classifier"),
        *both("choice_classifier", "classifier"),
        *both("qa_outputs", "qa_outputs"),
    ),
    aliases=(("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),),
    # A buffer in files written before transformers 4.31.
    ignored=(r"(distilbert\.)?embeddings\.position_ids",),
)
