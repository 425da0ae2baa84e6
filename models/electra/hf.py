"""Maps each native parameter of ELECTRA to its tensors in Hugging Face's checkpoints, for all
heads.
"""

from __future__ import annotations

from ..bert.hf import OLD_NORM_NAMES, both, encoder_entries
from ..name_map import NameEntry, NameMap

NAME_MAP = NameMap(
    prefix="electra.",
    entries=(
        *encoder_entries("electra."),
        *both("encoder.projection", "electra.embeddings_project"),
        *both("head.dense", "generator_predictions.dense"),
        *both("head.norm", "generator_predictions.LayerNorm"),
        NameEntry("head.decoder.weight", "generator_lm_head.weight"),
        NameEntry("head.decoder.bias", "generator_lm_head.bias"),
        *both("discriminator.dense", "discriminator_predictions.dense"),
        *both("discriminator.output", "discriminator_predictions.dense_prediction"),
        *both("pooler", "classifier.dense"),
        *both("classifier", "classifier.out_proj"),
        *both("summary", "sequence_summary.summary"),
        *both("token_classifier", "classifier"),
        *both("choice_classifier", "classifier"),
        *both("qa_outputs", "qa_outputs"),
    ),
    aliases=(("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),),
    renamed=OLD_NORM_NAMES,
    # A buffer in files written before transformers 4.31.
    ignored=(r"(electra\.)?embeddings\.position_ids",),
)
