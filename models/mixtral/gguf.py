"""Tells how GGUF files spell Mixtral, which have Llama's name and experts."""

from __future__ import annotations

from ...checkpoint.formats.gguf_file import GgufContents
from ..llama.gguf import HEAD_SIZE, gguf


def _has_experts(contents: GgufContents) -> bool:
    return contents.number("expert_count") > 0


GGUF = gguf(
    "llama",
    "MixtralForCausalLM",
    model_type="mixtral",
    keys={
        **HEAD_SIZE,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    block={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    },
    rotates_neighbors=True,
    is_meant=_has_experts,
)
