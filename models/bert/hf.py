"""Maps each native parameter of BERT to its tensors in Hugging Face's checkpoints, for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..name_map import NameEntry, NameMap

# Names in files that were converted from TensorFlow checkpoints.
OLD_NORM_NAMES = ((r"(.*LayerNorm)\.gamma", r"\1.weight"), (r"(.*LayerNorm)\.beta", r"\1.bias"))


def both(native: str, stored: str) -> tuple[NameEntry, NameEntry]:
    """Returns the entries of a weight and its bias."""
    weight = NameEntry(f"{native}.weight", f"{stored}.weight")
    bias = NameEntry(f"{native}.bias", f"{stored}.bias")
    return weight, bias


def encoder_entries(prefix: str) -> tuple[NameEntry, ...]:
    """Returns the entries of the encoder, whose stored names begin with `bert.` or `roberta.`."""
    layer = f"{prefix}encoder.layer.{{i}}"
    separate = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
    return (
        NameEntry("encoder.word_embeddings.weight", f"{prefix}embeddings.word_embeddings.weight"),
        NameEntry(
            "encoder.position_embeddings.weight", f"{prefix}embeddings.position_embeddings.weight"
        ),
        NameEntry(
            "encoder.token_type_embeddings.weight",
            f"{prefix}embeddings.token_type_embeddings.weight",
        ),
        *both("encoder.embedding_norm", f"{prefix}embeddings.LayerNorm"),
        NameEntry(
            "encoder.blocks.{i}.attention.qkv.weight", tuple(f"{name}.weight" for name in separate)
        ),
        NameEntry(
            "encoder.blocks.{i}.attention.qkv.bias", tuple(f"{name}.bias" for name in separate)
        ),
        *both("encoder.blocks.{i}.attention.output", f"{layer}.attention.output.dense"),
        *both("encoder.blocks.{i}.attention_norm", f"{layer}.attention.output.LayerNorm"),
        *cross_attention_entries(f"{layer}.crossattention"),
        *both("encoder.blocks.{i}.mlp.up", f"{layer}.intermediate.dense"),
        *both("encoder.blocks.{i}.mlp.down", f"{layer}.output.dense"),
        *both("encoder.blocks.{i}.mlp_norm", f"{layer}.output.LayerNorm"),
    )


def cross_attention_entries(stored: str) -> tuple[NameEntry, ...]:
    """Returns the entries of a decoder's attention to an encoder's output."""
    native = "encoder.blocks.{i}.cross_attention"
    entries: list[NameEntry] = []
    for kind in ("weight", "bias"):
        key_value = (f"{stored}.self.key.{kind}", f"{stored}.self.value.{kind}")
        entries.append(NameEntry(f"{native}.query.{kind}", f"{stored}.self.query.{kind}"))
        entries.append(NameEntry(f"{native}.key_value.{kind}", key_value))
    entries += both(f"{native}.output", f"{stored}.output.dense")
    entries += both(f"{native}_norm", f"{stored}.output.LayerNorm")
    return tuple(entries)


def with_norms_before(names: NameMap, stored: Mapping[str, str]) -> NameMap:
    """Returns the names of a model whose norms are those of `pre_norm.py`.

    Args:
        names: Those of the same model with norms after attention and MLP.
        stored: Each native norm, {i} for the number of its block -> Hugging Face's name.
    """
    entries: list[NameEntry] = []
    for entry in names.entries:
        module = entry.native.rpartition(".")[0]
        if module not in stored and module != "encoder.embedding_norm":
            entries.append(entry)
    for native, own in stored.items():
        entries += both(native, own)
    return replace(names, entries=tuple(entries))


NAME_MAP = NameMap(
    prefix="bert.",
    entries=(
        *encoder_entries("bert."),
        *both("head.dense", "cls.predictions.transform.dense"),
        *both("head.norm", "cls.predictions.transform.LayerNorm"),
        NameEntry("head.decoder.weight", "cls.predictions.decoder.weight"),
        NameEntry("head.decoder.bias", "cls.predictions.bias"),
        *both("pooler", "bert.pooler.dense"),
        *both("next_sentence", "cls.seq_relationship"),
        *both("classifier", "classifier"),
        *both("token_classifier", "classifier"),
        *both("choice_classifier", "classifier"),
        *both("qa_outputs", "qa_outputs"),
    ),
    aliases=(
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    renamed=OLD_NORM_NAMES,
    # A buffer in files written before transformers 4.31.
    ignored=(r"(bert\.)?embeddings\.position_ids",),
)
