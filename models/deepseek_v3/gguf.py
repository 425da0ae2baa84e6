"""Tells how GGUF files spell DeepSeek-V3 and its kin.

llama.cpp computes attention in the latent space, and stores the matrix of keys and values in two parts.
"""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats.gguf_file import GgufContents
from ..glm4_moe.gguf import CORRECTED_EXPERTS, CORRECTED_KEYS
from ..llama.gguf import gguf

_SIGMOID = 2  # the kind of scores of routers
_LARGEST = 256  # experts of DeepSeek-V3, whose groups are not in the first files


def _find_keys(contents: GgufContents) -> dict[str, Any]:
    heads = contents.number("attention.head_count")
    rotated = contents.number("rope.dimension_count")
    # The first files have the sizes of heads under the common names.
    keys = contents.number("attention.key_length_mla", contents.number("attention.key_length"))
    values = contents.number(
        "attention.value_length_mla", contents.number("attention.value_length")
    )
    found: dict[str, Any] = {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "q_lora_rank": contents.number("attention.q_lora_rank") or None,
    }
    if "expert_group_count" not in contents.values:
        is_largest = contents.number("expert_count") == _LARGEST
        found.update(n_group=8 if is_largest else 1, topk_group=4 if is_largest else 1)
    return found


def _has_sigmoid_scores(contents: GgufContents) -> bool:
    """Whether it is no DeepSeek-V2, whose routers take a softmax and have no corrections."""
    return contents.number("expert_gating_func") == _SIGMOID or any(
        name.endswith("exp_probs_b.bias") for name in contents.tensors
    )


GGUF = gguf(
    "deepseek2",
    "DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys={**CORRECTED_KEYS, "attention.kv_lora_rank": "kv_lora_rank"},
    block={
        **CORRECTED_EXPERTS,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    },
    latent="model.layers.{i}.self_attn.kv_b_proj.weight",
    find_keys=_find_keys,
    is_meant=_has_sigmoid_scores,
)
