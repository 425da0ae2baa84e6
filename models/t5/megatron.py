"""Maps T5's parameters to those of megatron-core's T5 with relative positions.

It is a T5 with `position_embedding_type="relative"`, `normalization="RMSNorm"`, no biases, and
`softmax_scale=1`. Every tensor-parallel rank, and every pipeline stage, has both tables of relative
biases whole. A tied head has a bias, which must be zero, and the head's input is never scaled. The
rows of a fused key-value matrix are, for each head, those of k and of v.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ...checkpoint.formats.megatron import name_repeated
from ..blocks.activation_functions import ACTIVATIONS
from ..megatron import (
    EMBEDDING,
    SUPPORTED,
    TIED_HEAD,
    MegatronMap,
    count_layers,
    find_matrix,
    rates,
)
from ..name_map import NameEntry, NameMap
from .config import T5Config

_TABLE = "{stack}_relative_pos_emb.relative_attention_bias.weight"
# Argument -> the values that a T5 has; the first one is written, and is meant if it is not stored.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in SUPPORTED.items() if name != "swiglu"},
    "position_embedding_type": ("relative",),
    "normalization": ("RMSNorm",),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "qk_layernorm": (False,),
    "softmax_scale": (1.0, 1),
    "layernorm_zero_centered_gamma": (False,),
}
_RATES = {"dropout_rate": "hidden_dropout"}


def _owns(names: Iterable[str], arguments: Mapping[str, Any], *, inferred: bool) -> bool:
    found = set(names)
    return inferred and _TABLE.format(stack="encoder") in found


def _entries() -> tuple[NameEntry, ...]:
    entries = [NameEntry("word_embeddings.weight", EMBEDDING), NameEntry("head.weight", TIED_HEAD)]
    for stack in ("encoder", "decoder"):
        block = f"{stack}.blocks.{{i}}"
        layer = f"{stack}.layers.{{i}}"
        own = {
            f"{block}.attention_norm.weight": f"{layer}.input_layernorm.weight",
            f"{block}.attention.qkv.weight": f"{layer}.self_attention.linear_qkv.weight",
            f"{block}.attention.output.weight": f"{layer}.self_attention.linear_proj.weight",
            f"{block}.mlp_norm.weight": f"{layer}.pre_mlp_layernorm.weight",
            f"{block}.mlp.up.weight": f"{layer}.mlp.linear_fc1.weight",
            f"{block}.mlp.gate_up.gate": f"{layer}.mlp.linear_fc1.gate",
            f"{block}.mlp.gate_up.up": f"{layer}.mlp.linear_fc1.up",
            f"{block}.mlp.down.weight": f"{layer}.mlp.linear_fc2.weight",
            f"{stack}.relative_bias.weight": _TABLE.format(stack=stack),
            f"{stack}.final_norm.weight": f"{stack}.final_layernorm.weight",
        }
        entries += [NameEntry(native, stored) for native, stored in own.items()]
    block = "decoder.blocks.{i}.cross_attention"
    layer = "decoder.layers.{i}"
    entries += [
        NameEntry(f"{block}_norm.weight", f"{layer}.pre_cross_attn_layernorm.weight"),
        NameEntry(f"{block}.query.weight", f"{layer}.cross_attention.linear_q.weight"),
        NameEntry(f"{block}.key_value.weight", f"{layer}.cross_attention.linear_kv.weight"),
        NameEntry(f"{block}.output.weight", f"{layer}.cross_attention.linear_proj.weight"),
    ]
    return tuple(entries)


def _infer(
    arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> T5Config:
    """Returns the configuration. Both stacks have their own number of layers, so `layers`, the
    larger one, is not used.
    """
    if "softmax_scale" not in arguments:
        raise ValueError(
            "its arguments lack softmax_scale; if it was 1, name a config.json by --config (by "
            "default megatron-core divides attention scores by sqrt(kv_channels), and a T5 does not)"
        )
    vocabulary, hidden = find_matrix(shapes, EMBEDDING)
    buckets, heads = find_matrix(shapes, _TABLE.format(stack="encoder"))
    rows, _ = find_matrix(shapes, "encoder.layers.0.mlp.linear_fc1.weight")
    _, inner = find_matrix(shapes, "encoder.layers.0.mlp.linear_fc2.weight")
    sizes = {"relative_attention_max_distance": arguments.get("relative_attention_max_distance")}
    epsilon = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon"))
    return T5Config(
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=arguments.get("kv_channels") or hidden // heads,
        d_ff=inner,
        num_layers=count_layers(name for name in shapes if name.startswith("encoder.")),
        num_decoder_layers=count_layers(name for name in shapes if name.startswith("decoder.")),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        layer_norm_epsilon=epsilon if isinstance(epsilon, float) else 1e-5,
        feed_forward_proj=_read_activation(arguments, is_gated=rows == 2 * inner),
        scale_decoder_outputs=False,
        **{name: value for name, value in sizes.items() if value is not None},
        **rates(arguments, _RATES),
    )


def _read_activation(arguments: Mapping[str, Any], *, is_gated: bool) -> str:
    """Returns `feed_forward_proj`. Megatron-LM's fused kernel of a gated GELU has the tanh."""
    found = arguments.get("activation_func")
    if not isinstance(found, str) or found not in ACTIVATIONS:
        is_tanh = bool(arguments.get("openai_gelu"))
        if is_gated:
            is_tanh = is_tanh or bool(arguments.get("bias_gelu_fusion", True))
        found = "gelu_new" if is_tanh else "gelu"
        if arguments.get("swiglu"):
            found = "silu"
    if not is_gated:
        return found
    # "gated-gelu" means the tanh approximation.
    return "gated-gelu" if found == "gelu_new" else f"gated-{found}"


def _check_config(config: T5Config, arguments: Mapping[str, Any]) -> None:
    reason = ""
    if not config.architecture.endswith("ForConditionalGeneration"):
        reason = f"a language-model head, not that of {config.architecture}"
    elif config.scale_decoder_outputs:
        reason = (
            "an unscaled head, but this model multiplies the head's input by d_model^-0.5 "
            "(scale_decoder_outputs=True)"
        )
    if reason:
        raise ValueError(f"megatron-core's T5 has {reason}")


def _arguments(config: T5Config) -> dict[str, Any]:
    """Returns megatron-core's arguments for a configuration.

    Raises ValueError if its T5 cannot be such a model.
    """
    _check_config(config, {})
    return {
        "num_layers": config.num_layers,
        "encoder_num_layers": config.num_layers,
        "decoder_num_layers": config.decoder_layers,
        "kv_channels": config.d_kv,
        "ffn_hidden_size": config.d_ff,
        "activation_func": config.activation,
        "gated_linear_unit": config.is_gated,
        "swiglu": config.is_gated and config.activation == "silu",
        "openai_gelu": config.activation == "gelu_new" and not config.is_gated,
        "bias_gelu_fusion": False,
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
        "norm_epsilon": config.layer_norm_epsilon,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "hidden_dropout": config.dropout_rate,
        "attention_dropout": config.dropout_rate,
    }


def megatron(*, inferred: bool = True) -> MegatronMap:
    """Returns the map of T5, or of a family with the same files, which is not `inferred`."""
    return MegatronMap(
        name_map=NameMap(entries=_entries(), aliases=((TIED_HEAD, EMBEDDING),)),
        stacks=("encoder", "decoder"),
        owns=partial(_owns, inferred=inferred),
        infer=_infer,
        arguments=_arguments,
        supported=_SUPPORTED,
        writable=("transformer_engine", "local"),
        fused_qkv=("attention.qkv.weight", "cross_attention.key_value.weight"),
        stored_whole=("relative_bias.weight",),
        repeated=((r"lm_head\.(output_layer\..*)", name_repeated(r"\1", 0)),),
        zeros=("output_layer.bias", "lm_head.output_layer.bias"),
        check_config=_check_config,
    )
