"""Maps GPT-2's parameters to those of Megatron-LM's GPT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..megatron import (
    EMBEDDING,
    TIED_HEAD,
    MegatronMap,
    Sizes,
    block_entries,
    has_tanh_gelu,
    rates,
    weight_and_bias,
)
from ..name_map import NameEntry, NameMap
from .config import GPT2Config

# Tensors that tell it from the decoders with rotary positions.
_OWN = ("embedding.position_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.bias")
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_RATES = {
    "resid_pdrop": "hidden_dropout",
    "embd_pdrop": "hidden_dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "init_method_std",
}


def _owns(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    found = set(names)
    if not any(name.startswith("decoder.layers.") for name in found):
        return False
    if any(name.startswith(("lm_head.", "encoder.")) for name in found):
        return False
    return not found.isdisjoint(_OWN)


def _infer(
    arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> GPT2Config:
    found = Sizes.find(arguments, shapes, "decoder")
    return GPT2Config(
        vocab_size=found.vocabulary,
        n_positions=found.positions,
        n_embd=found.hidden,
        n_layer=layers,
        n_head=found.heads,
        n_inner=found.inner,
        activation_function="gelu_new" if has_tanh_gelu(arguments) else "gelu",
        layer_norm_epsilon=found.norm_epsilon,
        bos_token_id=None,
        eos_token_id=None,
        **rates(arguments, _RATES),
    )


def _arguments(config: GPT2Config) -> dict[str, Any]:
    if config.activation_function not in (*_TANH, "gelu") or not config.scale_attn_weights:
        raise ValueError(
            "Megatron-LM's GPT has GELU and scaled attention, but this model has "
            f"activation_function={config.activation_function}, "
            f"scale_attn_weights={config.scale_attn_weights}"
        )
    if config.scale_attn_by_inverse_layer_idx:
        raise ValueError(
            "Megatron-LM's GPT does not scale attention by the layer: "
            "scale_attn_by_inverse_layer_idx=true"
        )
    tanh = config.activation_function in _TANH
    return {
        "ffn_hidden_size": config.inner_size,
        "norm_epsilon": config.layer_norm_epsilon,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "init_method_std": config.initializer_range,
        "bias_gelu_fusion": tanh,
        "openai_gelu": tanh,
    }


MEGATRON = MegatronMap(
    name_map=NameMap(
        entries=(
            NameEntry("word_embeddings.weight", EMBEDDING),
            NameEntry("position_embeddings.weight", "embedding.position_embeddings.weight"),
            *block_entries(
                "decoder",
                "blocks",
                (
                    ("ln_1", "decoder.layers.{i}.input_layernorm"),
                    ("ln_2", "decoder.layers.{i}.pre_mlp_layernorm"),
                ),
            ),
            *weight_and_bias("final_norm", "decoder.final_layernorm"),
            NameEntry("head.weight", TIED_HEAD),
        ),
        aliases=((TIED_HEAD, EMBEDDING),),
    ),
    stacks=("decoder",),
    owns=_owns,
    infer=_infer,
    arguments=_arguments,
)
