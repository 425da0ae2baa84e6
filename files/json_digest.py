"""Lets a small JSON file carry the sha256 of its own contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def add_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON represents them, with their sha256 as the last entry."""
    content = json.loads(json.dumps(values))
    return {**content, "sha256": _compute_digest(content)}


def remove_digest(content: dict[str, Any], what: object) -> None:
    """Removes the entry that `add_digest` added.

    Raises:
        ValueError: The digest does not match the contents; the message names `what`.
    """
    if content.pop("sha256", None) != _compute_digest(content):
        raise ValueError(f"{what} is damaged: its contents do not match its own sha256")


def _compute_digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
