"""Maps each native parameter of T5Gemma to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..name_map import NameEntry, NameMap

_NORMS = {
    "attention_norm": "pre_self_attn_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "cross_attention_norm": "pre_cross_attn_layernorm",
    "cross_attention_output_norm": "post_cross_attn_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def name_stack(stack: str, stored_stack: str) -> tuple[NameEntry, ...]:
    """Returns the entries of a stack.

    Args:
        stack: The stack's native name.
        stored_stack: What the names of its tensors in a file begin with.
    """
    native = f"{stack}.blocks.{{i}}"
    stored = f"{stored_stack}.layers.{{i}}"
    entries: list[NameEntry] = []
    for kind in ("weight", "bias"):
        own = tuple(f"{stored}.self_attn.{x}_proj.{kind}" for x in "qkv")
        source = tuple(f"{stored}.cross_attn.{x}_proj.{kind}" for x in "kv")
        cross = f"{native}.cross_attention"
        entries += [
            NameEntry(f"{native}.attention.qkv.{kind}", own),
            NameEntry(f"{native}.attention.output.{kind}", f"{stored}.self_attn.o_proj.{kind}"),
            NameEntry(f"{cross}.query.{kind}", f"{stored}.cross_attn.q_proj.{kind}"),
            NameEntry(f"{cross}.key_value.{kind}", source),
            NameEntry(f"{cross}.output.{kind}", f"{stored}.cross_attn.o_proj.{kind}"),
        ]
    return (
        *entries,
        *(
            NameEntry(f"{native}.{own}.weight", f"{stored}.{name}.weight")
            for own, name in _NORMS.items()
        ),
        NameEntry(
            f"{native}.mlp.gate_up.weight",
            (f"{stored}.mlp.gate_proj.weight", f"{stored}.mlp.up_proj.weight"),
        ),
        NameEntry(f"{native}.mlp.down.weight", f"{stored}.mlp.down_proj.weight"),
        NameEntry(f"{stack}.final_norm.weight", f"{stored_stack}.norm.weight"),
    )


NAME_MAP = NameMap(
    prefix="model.",
    entries=(
        NameEntry("encoder.word_embeddings.weight", "model.encoder.embed_tokens.weight"),
        NameEntry("word_embeddings.weight", "model.decoder.embed_tokens.weight"),
        *name_stack("encoder", "model.encoder"),
        *name_stack("decoder", "model.decoder"),
        NameEntry("head.weight", "lm_head.out_proj.weight"),
        NameEntry("classifier.weight", "score.out_proj.weight"),
        NameEntry("classifier.bias", "score.out_proj.bias"),
    ),
    aliases=(("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"),),
)
