"""Maps each native parameter of BART to its tensors in Hugging Face's checkpoints. mBART and M2M100
have the same.
"""

from __future__ import annotations

from dataclasses import replace

from ..name_map import NameEntry, NameMap


def both(native: str, stored: str) -> tuple[NameEntry, NameEntry]:
    """Returns the entries of a weight and its bias."""
    weight = NameEntry(f"{native}.weight", f"{stored}.weight")
    bias = NameEntry(f"{native}.bias", f"{stored}.bias")
    return weight, bias


def _projections(native: str, stored: str, names: str) -> tuple[NameEntry, ...]:
    """Returns the entries of projections that are stacked in one parameter."""
    return tuple(
        NameEntry(f"{native}.{kind}", tuple(f"{stored}.{name}_proj.{kind}" for name in names))
        for kind in ("weight", "bias")
    )


def _stack(stack: str) -> tuple[NameEntry, ...]:
    native = f"{stack}.blocks.{{i}}"
    stored = f"model.{stack}.layers.{{i}}"
    return (
        NameEntry(f"{stack}.position_embeddings.weight", f"model.{stack}.embed_positions.weight"),
        *both(f"{stack}.embedding_norm", f"model.{stack}.layernorm_embedding"),
        *_projections(f"{native}.attention.qkv", f"{stored}.self_attn", "qkv"),
        *both(f"{native}.attention.output", f"{stored}.self_attn.out_proj"),
        *both(f"{native}.attention_norm", f"{stored}.self_attn_layer_norm"),
        *both(f"{native}.mlp.up", f"{stored}.fc1"),
        *both(f"{native}.mlp.down", f"{stored}.fc2"),
        *both(f"{native}.mlp_norm", f"{stored}.final_layer_norm"),
        *both(f"{stack}.final_norm", f"model.{stack}.layer_norm"),
    )


_CROSS = "decoder.blocks.{i}.cross_attention"
_STORED_CROSS = "model.decoder.layers.{i}.encoder_attn"

NAME_MAP = NameMap(
    prefix="model.",
    entries=(
        NameEntry("word_embeddings.weight", "model.shared.weight"),
        *_stack("encoder"),
        *_stack("decoder"),
        *both(f"{_CROSS}.query", f"{_STORED_CROSS}.q_proj"),
        *_projections(f"{_CROSS}.key_value", _STORED_CROSS, "kv"),
        *both(f"{_CROSS}.output", f"{_STORED_CROSS}.out_proj"),
        *both(f"{_CROSS}_norm", f"{_STORED_CROSS}_layer_norm"),
        NameEntry("head.weight", "lm_head.weight"),
        NameEntry("head.fixed_bias", "final_logits_bias"),
        *both("pooler", "classification_head.dense"),
        *both("classifier", "classification_head.out_proj"),
        *both("qa_outputs", "qa_outputs"),
    ),
    aliases=(
        ("model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("model.decoder.embed_tokens.weight", "model.shared.weight"),
        ("lm_head.weight", "model.shared.weight"),
    ),
    ignored=(
        # Of old files: fairseq's version numbers, and M2M100's sinusoids.
        r"(model\.)?(encoder|decoder)\.version",
        r"(model\.)?(encoder|decoder)\.embed_positions\.weights",
    ),
    # Shards of version 1.0 keep it beside the parameters. Other files may have any values.
    zeros=("final_logits_bias",),
    own_embeddings=(
        NameEntry("encoder.word_embeddings.weight", "model.encoder.embed_tokens.weight"),
        NameEntry("decoder.word_embeddings.weight", "model.decoder.embed_tokens.weight"),
    ),
    # An encoder alone has the names that it has within a model, without those of the modules around.
    renamed=(
        (
            r"((?:layers|embed_tokens|embed_positions|layernorm_embedding|layer_norm)\..*)",
            r"model.encoder.\1",
        ),
    ),
    spelled=(
        (r".*ForCausalLM", r"model\.shared\.weight", "model.decoder.embed_tokens.weight"),
        (r".*Encoder", r"model\.shared\.weight", "embed_tokens.weight"),
        (r".*Encoder", r"model\.encoder\.(.*)", r"\1"),
    ),
)

# The sinusoids of Pegasus and Marian are computed; some files store them.
WITHOUT_POSITIONS = replace(
    NAME_MAP,
    entries=tuple(entry for entry in NAME_MAP.entries if "position" not in entry.native),
    ignored=(*NAME_MAP.ignored, r"(model\.)?(encoder|decoder)\.embed_positions\.weight"),
)
