"""Converts the state of a model and its optimizer to named tensors for safetensors, and to values
for JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.rank_files import MASTER_WEIGHT
from ...models.pipeline import find_copied_parameters

# Python's own numbers. Their 64-bit types distinguish them from an optimizer's fp32 scalars.
NUMBERS = {int: torch.int64, float: torch.float64}
UNSUPPORTED = object()  # stands for a value that JSON cannot hold, such as a function


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters, shared ones once, and copies of the persistent buffers, which forward
    passes change.

    Of a pipeline, the first of the stages that share a parameter returns it.
    """
    copies = find_copied_parameters(module)
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if name not in copies:
            tensors[name] = parameter.detach()
    for name, value in persistent_buffers(module).items():
        tensors[name] = value.detach().clone()
    return tensors


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a module's state that are not parameters."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name not in parameters and isinstance(value, Tensor):
            buffers[name] = value
    return buffers


def state_tensors(optimizer: torch.optim.Optimizer, owners: Mapping[Any, str]) -> dict[str, Tensor]:
    """Returns an optimizer's states by `<state>/<parameter>`.

    Numbers become tensors without dimensions, and None becomes an empty tensor.

    Args:
        optimizer: Any optimizer of torch.
        owners: The tensors that the optimizer updates -> the names of their parameters.

    Raises:
        ValueError: A state is of another type, or belongs to no parameter.
    """
    kind = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(state, Mapping) or (state and parameter not in owners):
            raise ValueError(
                f"{kind} keeps {parameter!r:.40} as state, which cannot be saved; use another "
                "optimizer"
            )
        for key, value in state.items():
            # A quantized state, as of torchao's optimizers, is a tensor of several tensors.
            is_quantized = isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")
            if is_quantized:
                for part in value.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
                    tensors[f"{key}.{part}/{owners[parameter]}"] = getattr(value, part)
                continue
            tensors[f"{key}/{owners[parameter]}"] = _as_tensor(f"{kind}'s {key}", value)
    return tensors


def _as_tensor(described: str, value: Any) -> Tensor:
    """Returns a state as a tensor. `described` is what a message calls it."""
    if isinstance(value, Tensor):
        return value
    if value is None:
        return torch.empty(0, dtype=torch.bool)
    if type(value) not in NUMBERS:
        raise ValueError(
            f"{described} is a {type(value).__name__}, which cannot be saved; use another optimizer"
        )
    return torch.tensor(value, dtype=NUMBERS[type(value)])


def load_state_tensors(
    optimizer: torch.optim.Optimizer,
    owners: Mapping[Any, str],
    tensors: Mapping[str, Tensor],
    step: int,
    device: torch.device | None = None,
) -> None:
    """Loads the tensors that `state_tensors` returned after `step` steps.

    Another engine may keep a single step count for all parameters; Adam's counts are then set to
    `step`.

    Args:
        device: Where states go; by default each to the device of what it belongs to.
    """
    by_name = {name: parameter for parameter, name in owners.items()}
    # Fused optimizers count on the device.
    counts_on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    optimizer.state.clear()
    for key, value in tensors.items():
        state, name = key.split("/", 1)
        if state == MASTER_WEIGHT or name not in by_name:
            continue
        parameter = by_name[name]
        optimizer.state[parameter][state] = _from_tensor(
            value, device or parameter.device, counts_on_device
        )
    if hasattr(optimizer, "join_states"):
        optimizer.join_states()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        count = torch.tensor(float(step))
        for parameter, state in optimizer.state.items():
            if "step" not in state:
                state["step"] = _from_tensor(count, parameter.device, counts_on_device)


def _from_tensor(value: Tensor, device: torch.device, counts_on_device: bool) -> Any:
    """Reverses `_as_tensor`.

    Args:
        device: Where the parameter is.
        counts_on_device: Whether tensors without dimensions, such as step counts, go there too;
            else they stay in CPU memory.
    """
    is_scalar = value.dim() == 0
    if is_scalar and value.dtype in NUMBERS.values():
        return value.item()
    if value.dtype == torch.bool and not value.numel():
        return None
    if is_scalar and not counts_on_device:
        return value.to("cpu").clone()
    return value.to(device).clone()


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the values of each parameter group, for JSON.

    Experts that an engine has separated from a group have that group's.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if "split_from" in group:
            continue
        groups.append({name: value for name, value in group.items() if name != "params"})
    return to_json(groups)


def group_changes(first: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the values that schedulers, or an optimizer that keeps state in its groups, have
    changed.

    The others are the user's choice, which may differ when the run resumes.
    """
    changes: list[dict[str, Any]] = []
    for first_group, group in zip(first, now, strict=True):
        changed = json_changes(first_group, group)
        changes.append({name: changed[name] for name in sorted(changed)})
    return changes


def load_group_changes(optimizer: torch.optim.Optimizer, changes: list[dict[str, Any]]) -> None:
    """Loads the result of `group_changes`. Raises ValueError for another number of groups."""
    groups = optimizer.param_groups
    count = sum("split_from" not in group for group in groups)
    if changes and len(changes) != count:
        raise ValueError(
            f"the run's optimizer had {len(changes)} parameter groups, and this one has "
            f"{count}; create it with the same groups as before"
        )
    for number, group in enumerate(groups if changes else []):
        for name, value in changes[group.get("split_from", number)].items():
            new = apply_changes(group.get(name), value)
            # Under ZeRO 3, a group has no parameters.
            if isinstance(new, Tensor) and group["params"]:
                new = new.to(group["params"][0].device)
            group[name] = new


def to_json(value: Any) -> Any:
    """Returns `value` in a form that JSON can hold, or UNSUPPORTED.

    Types that JSON lacks become a dict with the single key `tuple`, `tensor`, `counter` or `pairs`.
    A dict loses its unsupported entries; a list with an unsupported item is unsupported itself.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):  # also NumPy's numbers
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.tolist()]}
    if isinstance(value, (list, tuple)):
        items = [to_json(item) for item in value]
        if any(item is UNSUPPORTED for item in items):
            return UNSUPPORTED
        if isinstance(value, tuple):
            return {"tuple": items}
        return items
    if isinstance(value, dict):
        entries = {}
        for key, entry in value.items():
            item = to_json(entry)
            if item is not UNSUPPORTED:
                entries[key] = item
        if isinstance(value, Counter):
            return {"counter": [list(entry) for entry in entries.items()]}
        if all(isinstance(key, str) for key in entries):
            return entries
        return {"pairs": [list(entry) for entry in entries.items()]}
    return UNSUPPORTED


DECODERS = {
    "tuple": lambda items: tuple(from_json(item) for item in items),
    "tensor": lambda content: torch.tensor(content[1], dtype=getattr(torch, content[0])),
    "counter": lambda pairs: Counter({key: from_json(value) for key, value in pairs}),
    "pairs": lambda pairs: {key: from_json(value) for key, value in pairs},
}


def from_json(value: Any) -> Any:
    """Reverses `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if _is_encoded(value):
        [(kind, content)] = value.items()
        return DECODERS[kind](content)
    if isinstance(value, dict):
        return {name: from_json(item) for name, item in value.items()}
    return value


def json_changes(first: Any, now: Any) -> Any:
    """Returns the changes with which `apply_changes` makes `now` from `first`.

    Both are results of `to_json`.
    """
    if _are_dicts(first, now):
        changes: dict[str, Any] = {}
        for name, value in now.items():
            if name not in first:
                changes[name] = value
            elif first[name] != value:
                changes[name] = json_changes(first[name], value)
        return changes
    if _are_lists(first, now):
        return [json_changes(a, b) for a, b in zip(first, now, strict=True)]
    return now


def apply_changes(current: Any, change: Any) -> Any:
    """Applies the changes from `json_changes` to `current`, which is not in JSON form."""
    if _are_dicts(current, change):
        changed = dict(current)
        for name, value in change.items():
            changed[name] = apply_changes(current.get(name), value)
        return changed
    if _are_lists(current, change):
        return [apply_changes(a, b) for a, b in zip(current, change, strict=True)]
    return from_json(change)


def _are_dicts(a: Any, b: Any) -> bool:
    return isinstance(a, dict) and isinstance(b, dict) and not _is_encoded(a) and not _is_encoded(b)


def _are_lists(a: Any, b: Any) -> bool:
    """Returns whether both are equally long lists of dicts, as of a scheduler's parts.

    Others change as a whole.
    """
    both = isinstance(a, list) and isinstance(b, list) and len(a) == len(b)
    return both and all(_are_dicts(x, y) for x, y in zip(a, b, strict=True))


def _is_encoded(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)) in DECODERS
