"""An optimizer's state as named tensors, which safetensors can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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

    States that are not stored, such as a count of steps that another engine keeps for all parameters together, follow
    from `step`.
    """
    by_name = {name: parameter for parameter, name in owners.items()}
    optimizer.state.clear()
    for key, value in tensors.items():
        state, name = key.split("/", 1)
        if state != MASTER_WEIGHT and name in by_name:
            optimizer.state[by_name[name]][state] = _as_kept(state, value, by_name[name], optimizer)
    for state in optimizer.state.values():
        if "step" not in state and _counts_by_tensor(optimizer):
            state["step"] = torch.tensor(float(step))
    for group in optimizer.param_groups:
        if type(optimizer).__module__.startswith("pytorch_optimizer"):  # counts once for a group
            group["step"] = step


def _as_kept(state: str, value: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Any:
    if state == "step":
        return value.clone() if _counts_by_tensor(optimizer) else int(value)
    return value.to(parameter.device).clone()


def _counts_by_tensor(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, shared ones once, and copies of the persistent buffers, which a forward pass may change."""
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict().items():
        if name not in parameters and isinstance(value, Tensor):
            tensors[name] = value.detach().clone()
    return tensors
