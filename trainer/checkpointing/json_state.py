"""The values that optimizers' groups and schedulers keep, as JSON, and what of them has changed."""

from __future__ import annotations

from collections import Counter
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

LEFT_OUT = object()  # stands for what JSON cannot hold, such as a function


def plain(value: Any) -> Any:
    """`value` for JSON, or LEFT_OUT. What JSON lacks becomes a dict with the one key `tuple`, `tensor`, …; entries of
    a dict or list that JSON cannot hold are left out of the dict, or the list with them."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):  # NumPy's too
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.tolist()]}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        if any(item is LEFT_OUT for item in items):
            return LEFT_OUT
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        entries = {key: item for key, entry in value.items() if (item := plain(entry)) is not LEFT_OUT}
        if isinstance(value, Counter):
            return {"counter": [list(entry) for entry in entries.items()]}
        if all(isinstance(key, str) for key in entries):
            return entries
        return {"pairs": [list(entry) for entry in entries.items()]}
    return LEFT_OUT


MAKERS = {
    "tuple": lambda items: tuple(restored(item) for item in items),
    "tensor": lambda content: torch.tensor(content[1], dtype=getattr(torch, content[0])),
    "counter": lambda pairs: Counter({key: restored(value) for key, value in pairs}),
    "pairs": lambda pairs: {key: restored(value) for key, value in pairs},
}


def restored(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if _is_made(value):
        [(kind, content)] = value.items()
        return MAKERS[kind](content)
    return {name: restored(item) for name, item in value.items()} if isinstance(value, dict) else value


def changed(first: Any, now: Any) -> Any:
    """What is to be put over `first` so that it becomes `now`; both plain."""
    if _are_dicts(first, now):
        return {
            name: changed(first[name], value) if name in first else value
            for name, value in now.items()
            if name not in first or first[name] != value
        }
    if _are_lists(first, now):
        return [changed(a, b) for a, b in zip(first, now, strict=True)]
    return now


def put_over(current: Any, change: Any) -> Any:
    """`current`, as it was made, with what `changed` gave."""
    if _are_dicts(current, change):
        return {**current, **{name: put_over(current.get(name), value) for name, value in change.items()}}
    if _are_lists(current, change):
        return [put_over(a, b) for a, b in zip(current, change, strict=True)]
    return restored(change)


def _are_dicts(a: Any, b: Any) -> bool:
    return isinstance(a, dict) and isinstance(b, dict) and not _is_made(a) and not _is_made(b)


def _are_lists(a: Any, b: Any) -> bool:
    """Lists of dicts, such as a scheduler's of the states of its parts; other lists change as a whole."""
    both = isinstance(a, list) and isinstance(b, list) and len(a) == len(b)
    return both and all(_are_dicts(x, y) for x, y in zip(a, b, strict=True))


def _is_made(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)) in MAKERS
