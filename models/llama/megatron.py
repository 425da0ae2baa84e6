"""Maps the parameters of Llama, and of the decoders like it, to those of Megatron-LM's GPT with
rotary positions.

Megatron-LM's GPT is such a decoder with `--position-embedding-type rope --normalization RMSNorm
--swiglu --disable-bias-linear`; with `--add-qkv-bias` it is a Qwen2, with `--qk-layernorm` a Qwen3.
A rank's first matrix of the MLP has the rows of the gate before those of the up projection. The
rows of fused QKV are, for each key-value head, those of its query heads, of k and of v.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..blocks.rotary import RopeParameters
from ..megatron import EMBEDDING, SUPPORTED, TIED_HEAD, MegatronMap, rates
from ..name_map import NameEntry, NameMap
from .config import DecoderConfig

LAYER = "decoder.layers.{i}"
# Argument -> the values that a decoder of the zoo has; the first one is written, and is meant if it
# is not stored.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **SUPPORTED,
    "position_embedding_type": ("rope",),
    "use_rotary_position_embeddings": (False, True),  # an older option for the same
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "group_query_attention": (True, False),
    "rotary_percent": (1.0, 1),
    "rotary_interleaved": (False,),
    "window_size": (None,),
    "no_rope_freq": (None, 0),
    "softmax_type": ("vanilla",),
    "attention_output_gate": (False,),
    "mtp_num_layers": (None, 0),
}
_RATES = {"attention_dropout": "attention_dropout", "initializer_range": "init_method_std"}
# Megatron-LM's --use-rope-scaling: Llama 3.1's numbers, of which only the factor can be chosen.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_BIAS = "decoder.layers.0.self_attention.linear_qkv.bias"
_QK_NORM = "decoder.layers.0.self_attention.q_layernorm.weight"


def owns(names: Iterable[str], *, bias: bool = False, qk_norm: bool = False) -> bool:
    """Returns whether tensors of these names are of a decoder with rotary positions, with exactly
    these parts.
    """
    found = set(names)
    return (
        any(name.startswith("decoder.layers.") for name in found)
        and "decoder.layers.0.mlp.linear_fc1.bias" not in found
        and "embedding.position_embeddings.weight" not in found
        and ((_BIAS in found, _QK_NORM in found) == (bias, qk_norm))
        and not any(name.startswith(("lm_head.", "encoder.")) for name in found)
    )


def megatron(
    config: type[DecoderConfig], *, bias: bool = False, qk_norm: bool = False, inferred: bool = True
) -> MegatronMap:
    """Returns the map of a family with such parts.

    A family that is not `inferred` has the same files as another.
    """
    return MegatronMap(
        name_map=NameMap(entries=_entries(), aliases=((TIED_HEAD, EMBEDDING),)),
        stack="decoder",
        owns=partial(owns, bias=bias, qk_norm=qk_norm) if inferred else lambda names: False,
        infer=partial(_infer, config),
        arguments=_arguments,
        supported=_SUPPORTED,
        writable=("transformer_engine", "local"),
    )


def _entries() -> tuple[NameEntry, ...]:
    own = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.linear_qkv",
        "attention.q_norm": "self_attention.q_layernorm",
        "attention.k_norm": "self_attention.k_layernorm",
        "attention.output": "self_attention.linear_proj",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp.gate_up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    }
    return (
        NameEntry("word_embeddings.weight", EMBEDDING),
        *(
            NameEntry(f"blocks.{{i}}.{native}.weight", f"{LAYER}.{stored}.weight")
            for native, stored in own.items()
        ),
        NameEntry("blocks.{i}.attention.qkv.bias", f"{LAYER}.self_attention.linear_qkv.bias"),
        NameEntry("final_norm.weight", "decoder.final_layernorm.weight"),
        NameEntry("head.weight", TIED_HEAD),
    )


def _infer(
    config: type[DecoderConfig],
    arguments: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layers: int,
) -> DecoderConfig:
    (vocabulary, hidden), (inner, _) = (
        _matrix(shapes, name) for name in (EMBEDDING, LAYER.format(i=0) + ".mlp.linear_fc1.weight")
    )
    heads = arguments.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise ValueError(
            "its arguments, with the number of heads, are not stored; name a config.json by --config"
        )
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else heads
    sizes = {
        "num_key_value_heads": groups,
        "head_dim": arguments.get("kv_channels") or hidden // heads,
    }
    positions = arguments.get("max_position_embeddings")
    if type(positions) is int:
        sizes["max_position_embeddings"] = positions
    epsilon = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon"))
    make: Any = config
    return make(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        rms_norm_eps=epsilon if isinstance(epsilon, float) else 1e-5,
        rope_parameters=_rope(arguments),
        **sizes,
        **rates(arguments, _RATES),
        bos_token_id=None,
        eos_token_id=None,
    )


def _matrix(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    if len(found := shapes.get(name, ())) != 2:
        raise ValueError(
            f"{name} has the shape {list(found)}, but a matrix is needed to find the sizes"
        )
    return found[0], found[1]


def _rope(arguments: Mapping[str, Any]) -> RopeParameters:
    """Returns the rotation that the arguments describe.

    ValueError for one that transformers does not have.
    """
    base, factor = (
        arguments.get(n, default)
        for n, default in (("rotary_base", 10000), ("rope_scaling_factor", 8.0))
    )
    length = arguments.get("rotary_seq_len_interpolation_factor")
    for name, value in (
        ("rotary_base", base),
        ("rope_scaling_factor", factor),
        ("interpolation factor", length or 1),
    ):
        if type(value) not in (int, float):
            raise ValueError(f"its arguments say {name}={value!r}, which must be a number")
    theta = {"rope_theta": float(base)}
    if arguments.get("use_rope_scaling"):
        if length is not None:
            raise ValueError(
                "its arguments scale the rotation twice: use_rope_scaling, and an interpolation factor"
            )
        return {"rope_type": "llama3", **theta, "factor": float(factor), **_LLAMA3}
    return (
        {"rope_type": "default", **theta}
        if length is None
        else {"rope_type": "linear", **theta, "factor": length}
    )


def _arguments(config: DecoderConfig) -> dict[str, Any]:
    for wrong, reason in (
        (config.hidden_act != "silu", f"SwiGLU, but this model has hidden_act={config.hidden_act}"),
        (
            config.output_bias or config.mlp_bias,
            "no biases behind attention and MLP, but this model has some",
        ),
        (
            any(config.windows),
            f"no sliding window, but this model has one of {next(filter(None, config.windows), 0)}",
        ),
        (
            not config.architecture.endswith("ForCausalLM"),
            f"a language-model head, not that of {config.architecture}",
        ),
    ):
        if wrong:
            raise ValueError(f"Megatron-LM's GPT of this kind has {reason}")
    return {
        "ffn_hidden_size": config.intermediate_size,
        "kv_channels": config.head_size,
        "group_query_attention": config.key_value_heads != config.num_attention_heads,
        "num_query_groups": config.key_value_heads,
        "norm_epsilon": config.rms_norm_eps,
        "layernorm_epsilon": config.rms_norm_eps,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
        "init_method_std": config.initializer_range,
        **_rope_arguments(config.rope),
    }


def _rope_arguments(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Does the reverse of `_rope`."""
    found = {
        "rotary_base": rope["rope_theta"],
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
    }
    if rope["rope_type"] == "linear":
        return found | {"rotary_seq_len_interpolation_factor": rope["factor"]}
    if rope["rope_type"] == "llama3" and all(
        rope.get(name) == value for name, value in _LLAMA3.items()
    ):
        return found | {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] != "default":
        numbers = ", ".join(f"{name}={value}" for name, value in rope.items())
        raise ValueError(
            f"Megatron-LM's GPT rotates plainly, with linear scaling or Llama 3.1's, but not with {numbers}"
        )
    return found
