"""Converts checkpoint folders between Hugging Face's format and shards of any number of ranks, and verifies them.

Names are imported when they are first used, so that inspecting a folder does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inspection import diff, inspect_folder
    from .logits import compare_logits
    from .operations import Options, Outcome, merge, split
    from .plan import dry_run
    from .verification import Verdict, verify_equal, verify_folder, verify_round_trip

_MODULES = {
    "Options": "operations",
    "Outcome": "operations",
    "Verdict": "verification",
    "compare_logits": "logits",
    "diff": "inspection",
    "dry_run": "plan",
    "inspect_folder": "inspection",
    "merge": "operations",
    "split": "operations",
    "verify_equal": "verification",
    "verify_folder": "verification",
    "verify_round_trip": "verification",
}

__all__ = [
    "Options",
    "Outcome",
    "Verdict",
    "compare_logits",
    "diff",
    "dry_run",
    "inspect_folder",
    "merge",
    "split",
    "verify_equal",
    "verify_folder",
    "verify_round_trip",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
