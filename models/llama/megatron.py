"""Maps the parameters of Llama, and of the decoders like it, to those of Megatron-LM's GPT with
rotary positions.

Megatron-LM's GPT is such a decoder with `--position-embedding-type rope --normalization RMSNorm
--swiglu --disable-bias-linear`; with `--window-size` it is a Mistral, with `--add-qkv-bias` a Qwen2,
with `--qk-layernorm` a Qwen3.
Those with experts are in `../mixtral/megatron.py`.
A rank's first matrix of the MLP has the rows of the gate before those of the up projection. The
rows of fused QKV are, for each key-value head, those of its query heads, of k and of v.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, cast

from ..blocks.rotary import RopeParameters
from ..megatron import EMBEDDING, SUPPORTED, TIED_HEAD, MegatronMap, find_matrix, rates
from ..name_map import NameEntry, NameMap
from .config import DecoderConfig

LAYER = "decoder.layers.{i}"
# Argument -> the values that a decoder of the zoo has; the first one is written, and is meant if it
# is not stored.
SUPPORTED_ROTARY: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in SUPPORTED.items() if name != "window_size"},
    "position_embedding_type": ("rope",),
    "use_rotary_position_embeddings": (False, True),  # an older option for the same
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "group_query_attention": (True, False),
    "rotary_percent": (1.0, 1),
    "rotary_interleaved": (False,),
    "no_rope_freq": (None, 0),
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
_ROUTER = "decoder.layers.0.mlp.router.weight"
# Tensors that no decoder with rotary positions has.
_OF_OTHERS = ("decoder.layers.0.mlp.linear_fc1.bias", "embedding.position_embeddings.weight")


def owns_decoder(
    names: Iterable[str], *, bias: bool = False, qk_norm: bool = False, mixture: bool = False
) -> bool:
    """Returns whether tensors of these names are of a decoder with rotary positions, with exactly
    these parts.

    Args:
        bias: Biases of queries, keys and values.
        qk_norm: Norms of queries and keys.
        mixture: Experts.
    """
    found = set(names)
    if not any(name.startswith("decoder.layers.") for name in found):
        return False
    if any(name.startswith(("lm_head.", "encoder.")) for name in found):
        return False
    if not found.isdisjoint(_OF_OTHERS):
        return False
    parts = (_BIAS in found, _QK_NORM in found, _ROUTER in found)
    return parts == (bias, qk_norm, mixture)


def megatron(
    config: type[DecoderConfig],
    *,
    bias: bool = False,
    qk_norm: bool = False,
    windows: bool | None = None,
) -> MegatronMap:
    """Returns the map of a family with such parts.

    Args:
        config: The family's class of configurations.
        bias: Biases of queries, keys and values.
        qk_norm: Norms of queries and keys.
        windows: Whether runs of this family have sliding windows, if that tells it from another
            one with the same tensors.
    """
    return MegatronMap(
        name_map=NameMap(entries=_entries(), aliases=((TIED_HEAD, EMBEDDING),)),
        stacks=("decoder",),
        owns=partial(_owns, bias=bias, qk_norm=qk_norm, windows=windows),
        infer=partial(_infer, config),
        arguments=list_arguments,
        supported=SUPPORTED_ROTARY,
        writable=("transformer_engine", "local"),
        check_config=check_windows,
    )


def _owns(
    names: Iterable[str],
    arguments: Mapping[str, Any],
    *,
    bias: bool,
    qk_norm: bool,
    windows: bool | None,
) -> bool:
    if not owns_decoder(names, bias=bias, qk_norm=qk_norm):
        return False
    return windows is None or windows == (_find_window(arguments) is not None)


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
    inner, _ = find_matrix(shapes, LAYER.format(i=0) + ".mlp.linear_fc1.weight")
    return read_config(config, arguments, shapes, layers, {"intermediate_size": inner // 2})


def read_config(
    config: type[DecoderConfig],
    arguments: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layers: int,
    feed_forward: Mapping[str, Any],
) -> DecoderConfig:
    """Returns the configuration of a decoder that Megatron-LM's arguments describe.

    Args:
        config: The family's class.
        shapes: The tensors' full shapes, by the names of the style `local`.
        layers: The number of layers.
        feed_forward: The keys that describe MLPs or experts.

    Raises:
        ValueError: An argument is missing, or has no counterpart in transformers.
    """
    vocabulary, hidden = find_matrix(shapes, EMBEDDING)
    heads = arguments.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise ValueError(
            "its arguments, with the number of heads, are not stored; name a config.json by "
            "--config"
        )
    groups = heads
    if arguments.get("group_query_attention"):
        groups = arguments.get("num_query_groups")
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
        num_hidden_layers=layers,
        num_attention_heads=heads,
        rms_norm_eps=epsilon if isinstance(epsilon, float) else 1e-5,
        rope_parameters=_rope(arguments),
        **_window_keys(config, find_windows(arguments, layers)),
        **sizes,
        **feed_forward,
        **rates(arguments, _RATES),
        bos_token_id=None,
        eos_token_id=None,
    )


def find_windows(arguments: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer as transformers counts it, with the query's own
    position; None for a layer without one.

    Raises:
        ValueError: The arguments are none that Megatron-LM writes, or look at later positions.
    """
    window = _find_window(arguments)
    skipped = arguments.get("window_attn_skip_freq")
    if window is None or skipped is None:
        return (window,) * layers
    if type(skipped) is int and skipped > 0:
        # Each layer of that number attends to all positions; layers are counted from 1.
        return tuple(window if (i + 1) % skipped else None for i in range(layers))
    if isinstance(skipped, tuple) and len(cast("tuple[Any, ...]", skipped)) == layers:
        return tuple(window if has_window else None for has_window in cast(Any, skipped))
    raise ValueError(
        f"its arguments say window_attn_skip_freq={skipped!r}, which must be a positive number or a "
        f"list of a number for each of the {layers} layers"
    )


def _find_window(arguments: Mapping[str, Any]) -> int | None:
    """Returns the window that `window_size` describes: the number of positions before the query's
    own, without that, and the number behind it.
    """
    match arguments.get("window_size"):
        case None | (-1, 0):
            return None
        case (int(before), 0) if before >= 0:
            return before + 1
        case other:
            raise ValueError(
                f"its arguments say window_size={other!r}; a decoder's must be (positions before "
                "the own one, 0)"
            )


def _window_keys(config: type[DecoderConfig], windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Returns the keys of a configuration that describe sliding windows.

    Raises:
        ValueError: The family has no such windows.
    """
    window = next(filter(None, windows), None)
    if window is None:
        return {}
    names = {field.name for field in fields(config)}
    found: dict[str, Any] = {"sliding_window": window}
    if "use_sliding_window" in names:
        found["use_sliding_window"] = True
    if "layer_types" in names:
        found["layer_types"] = [
            "full_attention" if own is None else "sliding_attention" for own in windows
        ]
    elif None in windows:
        raise ValueError(
            "its arguments give a sliding window to some layers only (window_attn_skip_freq), but a "
            f"{config.model_type} has it in all layers or in none"
        )
    return found


def check_windows(config: DecoderConfig, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if a run's sliding windows are not those of a configuration.

    Arguments of releases without windows do not tell.
    """
    if "window_size" not in arguments:
        return
    windows = find_windows(arguments, config.num_hidden_layers)
    if windows != config.windows:
        for i, (stored, own) in enumerate(zip(windows, config.windows, strict=True)):
            if stored != own:
                raise ValueError(
                    f"layer {i} has a sliding window of {own} in config.json, but of {stored} in its "
                    f"arguments (window_size={arguments['window_size']!r}); set sliding_window in "
                    "config.json to that of the run, or to null for none"
                )


def _window_arguments(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Returns the arguments for the layers' sliding windows: the reverse of `find_windows`.

    Raises ValueError if they have several sizes.
    """
    sizes = sorted({window for window in windows if window is not None})
    if not sizes:
        return {"window_size": None}
    if len(sizes) > 1:
        raise ValueError(
            f"Megatron-LM's GPT has one sliding window for all layers that have any, but this model "
            f"has those of {sizes}"
        )
    found: dict[str, Any] = {"window_size": (sizes[0] - 1, 0), "window_attn_skip_freq": None}
    if None in windows:
        found["window_attn_skip_freq"] = [int(window is not None) for window in windows]
    return found


def _rope(arguments: Mapping[str, Any]) -> RopeParameters:
    """Returns the rotation that the arguments describe.

    Raises ValueError for one that transformers does not have.
    """
    base = arguments.get("rotary_base", 10000)
    factor = arguments.get("rope_scaling_factor", 8.0)
    length = arguments.get("rotary_seq_len_interpolation_factor")
    numbers = {
        "rotary_base": base,
        "rope_scaling_factor": factor,
        "interpolation factor": length or 1,
    }
    for name, value in numbers.items():
        if type(value) not in (int, float):
            raise ValueError(f"its arguments say {name}={value!r}, which must be a number")
    theta = {"rope_theta": float(base)}
    if arguments.get("use_rope_scaling"):
        if length is not None:
            raise ValueError(
                "its arguments scale the rotation twice: use_rope_scaling, and an interpolation "
                "factor"
            )
        return {"rope_type": "llama3", **theta, "factor": float(factor), **_LLAMA3}
    if length is not None:
        return {"rope_type": "linear", **theta, "factor": length}
    return {"rope_type": "default", **theta}


def list_arguments(config: DecoderConfig) -> dict[str, Any]:
    """Returns Megatron-LM's arguments for a configuration.

    Raises ValueError if its GPT cannot be such a model.
    """
    reason = ""
    if config.hidden_act != "silu":
        reason = f"SwiGLU, but this model has hidden_act={config.hidden_act}"
    elif config.output_bias or config.mlp_bias:
        reason = "no biases behind attention and MLP, but this model has some"
    elif not config.architecture.endswith("ForCausalLM"):
        reason = f"a language-model head, not that of {config.architecture}"
    if reason:
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
        **_window_arguments(config.windows),
        **_rope_arguments(config.rope),
    }


def _rope_arguments(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments for rotary parameters: the reverse of `_rope`."""
    found = {
        "rotary_base": rope["rope_theta"],
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
    }
    if rope["rope_type"] == "linear":
        return found | {"rotary_seq_len_interpolation_factor": rope["factor"]}
    is_llama3 = all(rope.get(name) == value for name, value in _LLAMA3.items())
    if rope["rope_type"] == "llama3" and is_llama3:
        return found | {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] != "default":
        numbers = ", ".join(f"{name}={value}" for name, value in rope.items())
        raise ValueError(
            "Megatron-LM's GPT rotates plainly, with linear scaling or Llama 3.1's, but not with "
            f"{numbers}"
        )
    return found
