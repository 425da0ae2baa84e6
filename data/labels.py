"""Defines the label that the loss ignores."""

from __future__ import annotations

from typing import Any

import numpy as np

IGNORED = -100  # as in torch's cross entropy and in transformers


def without_labels(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy whose labels are all −100, so that it adds nothing to the loss or its
    normalization.
    """
    if "labels" not in sample:
        raise ValueError(
            f"padding a batch needs samples with labels; these have {', '.join(sample)}"
        )
    return {**sample, "labels": np.full_like(np.asarray(sample["labels"]), IGNORED)}
