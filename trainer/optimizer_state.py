"""An optimizer's state as named tensors, which safetensors can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .optimizers import ELEMENT_STATES

MASTER_WEIGHT = "master_weight"


def state_tensors(optimizer: torch.optim.Optimizer, owners: Mapping[Any, str]) -> dict[str, Tensor]:
    """`<state>/<parameter>` -> the state itself; numbers become tensors without dimensions.

    owners: what the optimizer updates -> the parameter's name.
    """
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{key}/{owners[parameter]}"] = torch.as_tensor(value)
    return tensors


def load_state_tensors(
    optimizer: torch.optim.Optimizer, owners: Mapping[Any, str], tensors: Mapping[str, Tensor], step: int
) -> None:
    """Puts back what `state_tensors` gave after `step` steps.

    A count of steps that another engine keeps for all parameters together follows from `step`.
    """
    by_name = {name: parameter for parameter, name in owners.items()}
    optimizer.state.clear()
    for key, value in tensors.items():
        state, name = key.split("/", 1)
        if state != MASTER_WEIGHT and name in by_name:
            optimizer.state[by_name[name]][state] = _as_kept(state, value, by_name[name], optimizer)
    if _counts_by_tensor(optimizer) and type(optimizer).__name__ in ELEMENT_STATES:
        for state in optimizer.state.values():
            state.setdefault("step", torch.tensor(float(step)))
    for group in optimizer.param_groups:
        if type(optimizer).__module__.startswith("pytorch_optimizer"):  # counts once for a group
            group["step"] = step


def _as_kept(state: str, value: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Any:
    if state == "step":
        return value.clone() if _counts_by_tensor(optimizer) else int(value)
    return value.to(parameter.device).clone()


def _counts_by_tensor(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers of each parameter group, for JSON: also those in tuples, and tensors as dicts."""
    kinds = (bool, int, float, tuple, Tensor)
    groups = optimizer.param_groups
    return [{name: _plain(value) for name, value in group.items() if isinstance(value, kinds)} for group in groups]


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "tensor": value.tolist()}


def changed_values(first: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What schedulers, or an optimizer that keeps state in its groups, have changed; the rest is the user's choice,
    which may be another one when a run goes on."""
    return [
        {name: value for name, value in group.items() if name not in before or before[name] != value}
        for before, group in zip(first, now, strict=True)
    ]


def load_group_values(optimizer: torch.optim.Optimizer, changed: list[dict[str, Any]]) -> None:
    """Puts back what `changed_values` gave. ValueError for an optimizer with other groups."""
    groups = optimizer.param_groups
    if changed and len(changed) != len(groups):
        raise ValueError(
            f"the run's optimizer had {len(changed)} parameter groups, and this one has {len(groups)}; make it as it "
            "was"
        )
    for group, values in zip(groups, changed, strict=False):
        for name, value in values.items():
            if isinstance(value, dict):
                device = group["params"][0].device
                value = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device=device)
            group[name] = tuple(value) if isinstance(value, list) else value
