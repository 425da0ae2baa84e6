"""Maps the parameters of Mixtral and Qwen3-MoE to those of Megatron-LM's GPT with experts.

Megatron-LM's GPT is a Mixtral with the options of a Llama and `--num-experts`; with `--qk-layernorm` it
is a Qwen3-MoE. Its router takes the softmax over the chosen experts, which equals that over all of
them divided by the sum of the chosen ones; with `--moe-router-pre-softmax` nothing is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..llama.megatron import LAYER, SUPPORTED_ROTARY, list_arguments, owns_decoder, read_config
from ..llama.megatron import megatron as dense_megatron
from ..megatron import MegatronMap, find_matrix, rates
from ..name_map import NameEntry
from .config import MixtureConfig

_EXPERT = f"{LAYER}.mlp.experts.local_experts.{{e}}"
_ROUTER = f"{LAYER}.mlp.router.weight"
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in SUPPORTED_ROTARY.items() if name != "num_experts"},
    "moe_layer_freq": (1,),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_pre_softmax": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_latent_size": (None,),
}
_RATES = {"router_aux_loss_coef": "moe_aux_loss_coeff"}


def megatron(config: type[MixtureConfig], *, qk_norm: bool = False) -> MegatronMap:
    """Returns the map of a family of mixtures with such attention."""
    dense = dense_megatron(config, qk_norm=qk_norm)
    entries = (
        *(entry for entry in dense.name_map.entries if ".mlp." not in entry.native),
        NameEntry("blocks.{i}.mlp.router.weight", _ROUTER),
        NameEntry("blocks.{i}.mlp.experts.{e}.gate_up", f"{_EXPERT}.linear_fc1.weight"),
        NameEntry("blocks.{i}.mlp.experts.{e}.down", f"{_EXPERT}.linear_fc2.weight"),
    )
    supported = dict(_SUPPORTED)
    if qk_norm:
        supported["moe_router_pre_softmax"] = (False, True)
    return replace(
        dense,
        name_map=replace(dense.name_map, entries=entries),
        owns=partial(_owns, qk_norm=qk_norm),
        infer=partial(_infer, config),
        arguments=_arguments,
        supported=supported,
        mixture=True,
    )


def _owns(names: Iterable[str], arguments: Mapping[str, Any], *, qk_norm: bool) -> bool:
    return owns_decoder(names, qk_norm=qk_norm, mixture=True)


def _infer(
    config: type[MixtureConfig],
    arguments: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layers: int,
) -> MixtureConfig:
    experts, _ = find_matrix(shapes, _ROUTER.format(i=0))
    inner, _ = find_matrix(shapes, f"{_EXPERT.format(i=0, e=0)}.linear_fc1.weight")
    top_k = arguments.get("moe_router_topk", 2)
    if type(top_k) is not int:
        raise ValueError(f"its arguments say moe_router_topk={top_k!r}, which must be a number")
    sizes: dict[str, Any] = {
        "intermediate_size": inner // 2,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        **rates(arguments, _RATES),
    }
    if hasattr(config, "moe_intermediate_size"):
        sizes["moe_intermediate_size"] = inner // 2
        sizes["norm_topk_prob"] = not arguments.get("moe_router_pre_softmax", False)
        own = arguments.get("ffn_hidden_size")
        if type(own) is int:
            sizes["intermediate_size"] = own
    found: Any = read_config(config, arguments, shapes, layers, sizes)
    return found


def _arguments(config: MixtureConfig) -> dict[str, Any]:
    """Returns Megatron-LM's arguments for a configuration.

    Raises ValueError if its GPT cannot be such a model.
    """
    if not all(map(config.has_experts, range(config.num_hidden_layers))):
        raise ValueError(
            "Megatron-LM's GPT of this kind has experts in every layer, but this model has single "
            "MLPs in some (decoder_sparse_step, mlp_only_layers)"
        )
    return {
        **list_arguments(config),
        "num_experts": config.expert_count,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.normalizes_weights,
        "moe_ffn_hidden_size": config.expert_size,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.router_aux_loss_coef,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 1,
    }
