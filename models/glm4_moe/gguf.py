"""Tells how GGUF files spell GLM-4.5 and its kin."""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats.gguf_file import GgufContents
from ..glm4.gguf import find_rotated_part
from ..llama.gguf import EXPERTS, HEAD_SIZE, gguf

# Of mixtures whose router has a correction for each expert.
CORRECTED_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
CORRECTED_EXPERTS = {
    **EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def _find_keys(contents: GgufContents) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in contents.tensors
    return {**find_rotated_part(contents), "use_qk_norm": has_norms}


GGUF = gguf(
    "glm4moe",
    "Glm4MoeForCausalLM",
    model_type="glm4_moe",
    keys={**HEAD_SIZE, **CORRECTED_KEYS},
    block={**CORRECTED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
    flags={"attention_bias": "model.layers.0.self_attn.q_proj.bias"},
    find_keys=_find_keys,
)
