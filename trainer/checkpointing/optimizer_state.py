"""An optimizer's state as named tensors, which safetensors can hold, and the values of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .json_state import changed, plain, put_over

MASTER_WEIGHT = "master_weight"
NUMBERS = {int: torch.int64, float: torch.float64}  # Python's own, told from an optimizer's fp32 scalars by their width


def state_tensors(optimizer: torch.optim.Optimizer, owners: Mapping[Any, str]) -> dict[str, Tensor]:
    """`<state>/<parameter>` -> the state itself; numbers become tensors without dimensions, None an empty one.

    owners: what the optimizer updates -> the parameter's name. ValueError for states of other kinds.
    """
    tensors = {}
    for parameter, state in optimizer.state.items():
        if parameter not in owners or not isinstance(state, Mapping):
            raise ValueError(f"{type(optimizer).__name__} keeps {parameter!r:.40} as state, which cannot be saved")
        for key, value in state.items():
            tensors[f"{key}/{owners[parameter]}"] = _as_tensor(f"{type(optimizer).__name__}'s {key}", value)
    return tensors


def _as_tensor(described: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if value is None:
        return torch.empty(0, dtype=torch.bool)
    if type(value) not in NUMBERS:
        raise ValueError(f"{described} is a {type(value).__name__}, which cannot be saved; use another optimizer")
    return torch.tensor(value, dtype=NUMBERS[type(value)])


def load_state_tensors(
    optimizer: torch.optim.Optimizer, owners: Mapping[Any, str], tensors: Mapping[str, Tensor], step: int
) -> None:
    """Puts back what `state_tensors` gave after `step` steps.

    A count of steps that another engine keeps for all parameters together follows from `step`.
    """
    by_name = {name: parameter for parameter, name in owners.items()}
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    optimizer.state.clear()
    for key, value in tensors.items():
        state, name = key.split("/", 1)
        if state != MASTER_WEIGHT and name in by_name:
            parameter = by_name[name]
            optimizer.state[parameter][state] = _restored(value, parameter.device, on_device)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for parameter, state in optimizer.state.items():
            if "step" not in state:
                state["step"] = _restored(torch.tensor(float(step)), parameter.device, on_device)


def _restored(value: Tensor, device: torch.device, on_device: bool) -> Any:
    """on_device: whether scalars lie beside the parameters, or in CPU memory."""
    if value.dim() == 0:
        is_number = value.dtype in NUMBERS.values()
        return value.item() if is_number else value.to(device if on_device else "cpu").clone()
    if value.dtype == torch.bool and not value.numel():
        return None
    return value.to(device).clone()


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The values of each parameter group, for JSON."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return plain(groups)


def changed_values(first: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What schedulers, or an optimizer that keeps state in its groups, have changed; the rest is the user's choice,
    which may be another one when a run goes on."""
    return [dict(sorted(changed(*pair).items())) for pair in zip(first, now, strict=True)]


def load_group_values(optimizer: torch.optim.Optimizer, changes: list[dict[str, Any]]) -> None:
    """Puts back what `changed_values` gave. ValueError for an optimizer with other groups."""
    groups = optimizer.param_groups
    if changes and len(changes) != len(groups):
        raise ValueError(
            f"the run's optimizer had {len(changes)} parameter groups, and this one has {len(groups)}; make it as it "
            "was"
        )
    for group, change in zip(groups, changes, strict=False):
        for name, value in change.items():
            new = put_over(group.get(name), value)
            on_device = isinstance(new, Tensor) and group["params"]  # ZeRO 3 leaves none of them in the group
            group[name] = new.to(group["params"][0].device) if on_device else new
