"""Maps each native parameter of RoBERTa to its tensors in Hugging Face's checkpoints, for all
heads.
"""

from __future__ import annotations

from ..bert.hf import OLD_NORM_NAMES, both, encoder_entries
from ..name_map import NameEntry, NameMap

NAME_MAP = NameMap(
    prefix="roberta.",
    entries=(
        *encoder_entries("roberta."),
        *both("head.dense", "lm_head.dense"),
        *both("head.norm", "lm_head.layer_norm"),
        NameEntry("head.decoder.weight", "lm_head.decoder.weight"),
        NameEntry("head.decoder.bias", "lm_head.bias"),
        *both("pooler", "classifier.dense"),
        *both("classifier", "classifier.out_proj"),
        *both("encoder_pooler", "roberta.pooler.dense"),
        *both("token_classifier", "classifier"),
        *both("choice_classifier", "classifier"),
        *both("qa_outputs", "qa_outputs"),
    ),
    aliases=(
        ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "lm_head.bias"),
    ),
    renamed=OLD_NORM_NAMES,
    # A buffer in files written before transformers 4.31.
    ignored=(r"(roberta\.)?embeddings\.position_ids",),
)
