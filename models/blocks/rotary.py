"""Computes rotary positions (Su et al., 2021, arXiv:2104.09864) with the published scalings of
their frequencies.

Pairs of features turn by an angle that is the position times the pair's frequency. As in Hugging
Face, features i and i + R/2 are a pair, or features 2i and 2i + 1 if `interleaved`, where R ≤ D
features of each head rotate. The angles are computed in fp32 and their cosines and sines are
rounded to the dtype of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...mpu import ParallelMesh, cut_sequence
from ...ops.dispatcher import can_bypass_dispatcher
from ...ops.rotary import rotate_op, split_pairs

RopeValue = str | float | bool | list[float] | None
RopeParameters = dict[str, RopeValue]
"""The `rope_parameters` of a `config.json` of transformers: `rope_type`, `rope_theta` and the
numbers of the scaling.
"""

# The numbers that each type of scaling needs.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# The types that compare positions with the length that the model was pretrained with.
_WITH_ORIGINAL = ("yarn", "longrope", "llama3")


class Rotary(NamedTuple):
    """The rotation of queries and keys.

    Attributes:
        cos, sin: [B or 1, 1, S, R/2], for R rotated features of each head.
        interleaved: Whether features 2i and 2i + 1 are a pair, instead of i and i + R/2.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def rotary_embedding(
    position_ids: Tensor,
    head_size: int,
    parameters: Mapping[str, Any],
    max_positions: int,
    dtype: torch.dtype,
    *,
    interleaved: bool = False,
    mesh: ParallelMesh | None = None,
) -> Rotary:
    """Returns the rotation for positions int64 [B or 1, S], or for this rank's part of them.

    Args:
        parameters: From `read_rope_parameters`.
        max_positions: `max_position_embeddings`, from which some scalings start.
        dtype: The dtype of the result.
        mesh: Its context-parallel ranks share the sequence.
    """
    rotated = int(head_size * parameters.get("partial_rotary_factor", 1.0))
    scaled = _SCALINGS[parameters["rope_type"]]
    frequencies, factor = scaled(rotated, parameters, max_positions, position_ids)
    own_positions = cut_sequence(position_ids, mesh)
    angles = own_positions[:, None, :, None].float() * frequencies
    return Rotary((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype), interleaved)


def rotate(q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Rotates queries [B, N, S, D] and keys [B, K, S, D] to their positions.

    Each product is rounded, as in transformers.
    """
    if can_bypass_dispatcher(q, k):
        return rotate_op(q, k, rotary.cos, rotary.sin, rotary.interleaved, False)
    return _rotate_by_torch(q, rotary), _rotate_by_torch(k, rotary)


def _rotate_by_torch(x: Tensor, rotary: Rotary) -> Tensor:
    """Returns x [B, N, S, D], rotated by PyTorch's operators, which a compiler fuses."""
    # The result is [B, S, N, D] in memory, so that attention's output is too and needs no copy to
    # merge its heads.
    x = x.transpose(1, 2)
    cos = rotary.cos.transpose(1, 2)
    sin = rotary.sin.transpose(1, 2)
    first, second, rest = split_pairs(x, 2 * cos.shape[-1], rotary.interleaved)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if rotary.interleaved:
        parts = [torch.stack([turned_first, turned_second], dim=-1).flatten(-2), rest]
    else:
        parts = [turned_first, turned_second, rest]
    return torch.cat(parts, dim=-1).transpose(1, 2)


def read_rope_parameters(
    values: Mapping[str, Any], max_positions: int, *, theta: float = 10000.0, partial: float = 1.0
) -> RopeParameters:
    """Returns the `rope_parameters` of the contents of a `config.json`.

    Files of transformers 4 have `rope_theta`, `rope_scaling` (whose `type` is today's `rope_type`)
    and `partial_rotary_factor` instead.

    Args:
        max_positions: The model's `max_position_embeddings`.
        theta, partial: The family's values where the file has none.
    """
    found: Any = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"rope_parameters must be an object, not {found!r}")
    stored = cast(Mapping[str, Any], found)
    parameters: RopeParameters = {key: value for key, value in stored.items() if key != "type"}
    parameters.setdefault("rope_type", stored.get("type", "default"))
    parameters.setdefault("rope_theta", values.get("rope_theta") or theta)
    if parameters.get("partial_rotary_factor") is None:
        parameters["partial_rotary_factor"] = values.get("partial_rotary_factor") or partial
    if parameters["partial_rotary_factor"] == 1.0:
        del parameters["partial_rotary_factor"]
    if parameters["rope_type"] in tuple(_WITH_ORIGINAL):
        original = values.get("original_max_position_embeddings") or parameters.get(
            "original_max_position_embeddings"
        )
        parameters["original_max_position_embeddings"] = original or max_positions
    return parameters


def read_ropes_by_layer_type(
    values: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Returns the parameters of the layers that attend to whole sequences, and of those with a
    window, of a `config.json` of transformers 5 that has an object for each; else None.
    """
    stored = _check_object(values.get("rope_parameters"))
    if "sliding_attention" not in stored and "full_attention" not in stored:
        return None
    whole = _check_object(stored.get("full_attention"))
    return whole, _check_object(stored.get("sliding_attention"))


def _check_object(value: Any) -> Mapping[str, Any]:
    """Returns an object of a `config.json`; an empty one for null."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"rope_parameters must be objects, not {value!r}")
    return cast(Mapping[str, Any], value or {})


def ignore_partial_rotation(parameters: RopeParameters) -> RopeParameters:
    """Returns the parameters of a family that rotates whole heads.

    Its classes of transformers read `partial_rotary_factor` only where frequencies are scaled.
    """
    if parameters["rope_type"] != "default":
        return parameters
    return {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}


def check_whole_rotation(parameters: Mapping[str, Any], model_type: str) -> None:
    """Raises ValueError if parameters rotate a part of each head."""
    rotated = parameters.get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ValueError(
            f"{model_type} rotates whole heads: partial_rotary_factor={rotated} must be 1"
        )


def check_rope_parameters(parameters: Mapping[str, Any], head_size: int) -> None:
    """Raises ValueError unless the parameters are complete and in range."""
    kind = parameters.get("rope_type")
    if kind not in tuple(_REQUIRED):  # a file may have a list there, which is no key
        raise ValueError(f"rope_type {kind!r} is not supported; use one of {', '.join(_REQUIRED)}")
    numbers = {
        "rope_theta": 0.0,
        "partial_rotary_factor": 0.0,
        "original_max_position_embeddings": 0.0,
    }
    if kind != "default":
        numbers |= {
            "factor": 1.0,
            "low_freq_factor": 0.0,
            "high_freq_factor": 0.0,
            "attention_factor": 0.0,
        }
    for name in ("rope_theta", *_REQUIRED[kind]):
        if parameters.get(name) is None:
            raise ValueError(f"rope_parameters of type {kind} need {name}")
    for name, least in numbers.items():
        value = parameters.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float))
        if not is_number or not least <= value < math.inf or value == 0:
            raise ValueError(
                f"rope_parameters: {name} must be a number of at least {least:g}, not 0; got "
                f"{value!r}"
            )

    rotated = head_size * parameters.get("partial_rotary_factor", 1.0)
    pairs = (int(rotated) + 1) // 2
    least = 3 if parameters["rope_type"] == "dynamic" else 1
    if int(rotated) < least or 2 * pairs > head_size:
        raise ValueError(
            "rotary positions turn pairs of a head's features: partial_rotary_factor times the "
            f"head size {head_size} must be from {least} to {head_size - head_size % 2}, not "
            f"{rotated:g}"
        )
    if kind != "longrope":
        return
    for name in ("short_factor", "long_factor"):
        if not isinstance(parameters[name], list) or len(parameters[name]) != pairs:
            raise ValueError(f"rope_parameters: {name} must be a list of {pairs} numbers")


# The functions of the scalings return the frequency of each pair of features, fp32 [R/2], and a
# factor of the cosines and sines. They take R, the parameters, `max_positions` and the positions.


def _exponents(rotated: int, position_ids: Tensor) -> Tensor:
    """Returns 2i / R for each pair i. An odd R turns one feature more, as in transformers."""
    return torch.arange(0, rotated, 2, device=position_ids.device, dtype=torch.float32) / rotated


def _default(
    rotated: int, parameters: Mapping[str, Any], max_positions: int, position_ids: Tensor
) -> tuple[Tensor, float]:
    """Returns theta^(-2i / R) for each pair i."""
    frequencies = 1.0 / parameters["rope_theta"] ** _exponents(rotated, position_ids)
    return frequencies, 1.0


def _linear(rotated: int, parameters: Mapping[str, Any], *call: Any) -> tuple[Tensor, float]:
    """Interpolates positions (Chen et al., 2023, arXiv:2306.15595)."""
    frequencies, _ = _default(rotated, parameters, *call)
    return frequencies / parameters["factor"], 1.0


def _dynamic(
    rotated: int, parameters: Mapping[str, Any], max_positions: int, position_ids: Tensor
) -> tuple[Tensor, float]:
    """Scales theta with the length of the call's longest sequence beyond `max_positions` (dynamic
    NTK scaling).
    """
    factor = parameters["factor"]
    length = (position_ids.max() + 1).clamp(min=max_positions)
    stretch = factor * length / max_positions - (factor - 1)
    theta = parameters["rope_theta"] * stretch ** (rotated / (rotated - 2))
    return 1.0 / theta ** _exponents(rotated, position_ids), 1.0


def _yarn(
    rotated: int, parameters: Mapping[str, Any], max_positions: int, position_ids: Tensor
) -> tuple[Tensor, float]:
    """Computes YaRN (Peng et al., 2023, arXiv:2309.00071, sections 3.2 to 3.4).

    Pairs that turn more than `beta_fast` times within the original length keep their frequency,
    those that turn less than `beta_slow` times are interpolated, and a ramp joins them.
    """
    theta = parameters["rope_theta"]
    factor = parameters["factor"]
    exponents = _exponents(rotated, position_ids)
    original = parameters["original_max_position_embeddings"]

    def find_pair(turns: float) -> float:
        """Returns the number of the pair that turns so often within the original length."""
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = find_pair(parameters.get("beta_fast") or 32)
    high = find_pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotated - 1)
    width = high - low if high != low else 0.001
    ramp = torch.arange(len(exponents), device=exponents.device, dtype=torch.float32) - low
    kept = 1 - (ramp / width).clamp(0, 1)
    powers = theta**exponents
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, _compute_yarn_attention_factor(parameters)


def _compute_yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """Returns YaRN's factor of the cosines and sines (section 3.4, and DeepSeek's `mscale`)."""

    def mscale(weight: float) -> float:
        if parameters["factor"] <= 1:
            return 1.0
        return 0.1 * weight * math.log(parameters["factor"]) + 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def _longrope(
    rotated: int, parameters: Mapping[str, Any], max_positions: int, position_ids: Tensor
) -> tuple[Tensor, float]:
    """Computes LongRoPE (Ding et al., 2024, arXiv:2402.13753): a divisor for each pair, and another
    one beyond the original length.
    """
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    exponents = _exponents(rotated, position_ids)
    long = exponents.new_tensor(parameters["long_factor"])
    short = exponents.new_tensor(parameters["short_factor"])
    divisors = torch.where(position_ids.max() + 1 > original, long, short)
    return 1.0 / (divisors * parameters["rope_theta"] ** exponents), attention


def _llama3(rotated: int, parameters: Mapping[str, Any], *call: Any) -> tuple[Tensor, float]:
    """Computes Llama 3.1's scaling (Dubey et al., 2024, arXiv:2407.21783): long wavelengths are
    stretched, and medium ones are a blend.
    """
    frequencies, _ = _default(rotated, parameters, *call)
    factor = parameters["factor"]
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept = (original / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / factor + kept * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled), 1.0


_SCALINGS: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
