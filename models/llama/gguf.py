"""Tells how GGUF files spell Llama and the decoders like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checkpoint.formats.gguf_file import GgufArchitecture

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
HEAD_SIZE = {"attention.key_length": "head_dim"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# Of models that normalize the outputs of attention and MLP, too.
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}


def gguf(
    name: str,
    class_name: str,
    *,
    model_type: str | None = None,
    keys: Mapping[str, str] | None = None,
    block: Mapping[str, str] | None = None,
    **facts: Any,
) -> GgufArchitecture:
    """Returns the spelling of a family of decoders.

    Args:
        name: GGUF's name of the family.
        class_name: Its class of transformers with the language-model head.
        model_type: The family's name, if it is another.
        keys: Further keys of the header; see `GgufArchitecture`.
        block: Tensors of a block that are named in another way.
        facts: Other arguments of `GgufArchitecture`.
    """
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for stored, own in {**_BLOCK, **(block or {})}.items():
        names[f"blk.{stored}"] = f"model.layers.{{i}}.{own}"
    sizes = {**_SIZES, **(keys or {})}
    return GgufArchitecture(name, model_type or name, class_name, names, sizes, **facts)


GGUF = gguf(
    "llama",
    "LlamaForCausalLM",
    keys=HEAD_SIZE,
    rotates_neighbors=True,
    flags={"attention_bias": "model.layers.0.self_attn.q_proj.bias"},
)
