"""Maps each native parameter of Llama, and of the decoders like it, to its tensors in Hugging
Face's checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from ..name_map import NameEntry, NameMap

LAYER = "model.layers.{i}"
ATTENTION = "blocks.{i}.attention"
MLP = "blocks.{i}.mlp"


def name_map(
    norms: dict[str, str],
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    experts: tuple[NameEntry, ...] = (),
    renamed: tuple[tuple[str, str], ...] = (),
) -> NameMap:
    """Returns the map of a family.

    Args:
        norms: Native name of a block's norm -> its stored name.
        gate_up: The stored projections that are stacked in the MLP's first one.
        qkv: The stored projections that are stacked in attention's first one.
        experts: The entries of a mixture's parameters.
        renamed: Further names of old files; see `NameMap`.
    """
    kinds = ("weight", "bias")
    return NameMap(
        prefix="model.",
        entries=(
            NameEntry("word_embeddings.weight", "model.embed_tokens.weight"),
            *(
                NameEntry(
                    f"{ATTENTION}.qkv.{k}", tuple(f"{LAYER}.self_attn.{part}.{k}" for part in qkv)
                )
                for k in kinds
            ),
            NameEntry(f"{ATTENTION}.q_norm.weight", f"{LAYER}.self_attn.q_norm.weight"),
            NameEntry(f"{ATTENTION}.k_norm.weight", f"{LAYER}.self_attn.k_norm.weight"),
            NameEntry(f"{ATTENTION}.qk_norms.q_weight", f"{LAYER}.self_attn.q_norm.weight"),
            NameEntry(f"{ATTENTION}.qk_norms.k_weight", f"{LAYER}.self_attn.k_norm.weight"),
            *(NameEntry(f"{ATTENTION}.output.{k}", f"{LAYER}.self_attn.o_proj.{k}") for k in kinds),
            *(
                NameEntry(f"blocks.{{i}}.{own}.weight", f"{LAYER}.{stored}.weight")
                for own, stored in norms.items()
            ),
            *(
                NameEntry(
                    f"{MLP}.gate_up.{k}", tuple(f"{LAYER}.mlp.{part}.{k}" for part in gate_up)
                )
                for k in kinds
            ),
            *(NameEntry(f"{MLP}.down.{k}", f"{LAYER}.mlp.down_proj.{k}") for k in kinds),
            *experts,
            NameEntry("final_norm.weight", "model.norm.weight"),
            NameEntry("head.weight", "lm_head.weight"),
            NameEntry("classifier.weight", "score.weight"),
            NameEntry("classifier.bias", "score.bias"),
            NameEntry("qa_outputs.weight", "qa_outputs.weight"),
            NameEntry("qa_outputs.bias", "qa_outputs.bias"),
        ),
        aliases=(("lm_head.weight", "model.embed_tokens.weight"),),
        renamed=((r"transformer\.(.*)", r"model.\1"), *renamed),  # question answering
        spelled=(
            (
                r"(Llama|Qwen2|Qwen3|Qwen3Moe|SmolLM3)ForQuestionAnswering",
                r"model\.(.*)",
                r"transformer.\1",
            ),
        ),
        # A buffer in old files: of each layer, later of the model.
        ignored=(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq",),
    )


def keep_norms_of_all_heads(names: NameMap) -> NameMap:
    """Returns a map without the norms of each head's queries and keys, for a family whose norms are
    those of all heads together.
    """
    of_each_head = ("attention.q_norm.weight", "attention.k_norm.weight")
    entries = tuple(entry for entry in names.entries if not entry.native.endswith(of_each_head))
    return replace(names, entries=entries)


NAME_MAP = name_map({"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
