"""Element conversion for `--dtype`."""

from __future__ import annotations

import numpy as np

from ..checkpoint.dtypes import item_size, torch_name


def cast(block: np.ndarray, source: str, target: str, name: str) -> np.ndarray:
    """Converts elements, kept as unsigned integers of their size, from one float type to another.

    Rounds to nearest, ties to even, as torch does. ValueError, naming the parameter, if a finite value
    would become infinite or NaN.
    """
    import torch

    values = torch.from_numpy(block.view(f"i{item_size(source)}")).view(getattr(torch, torch_name(source)))
    converted = values.to(getattr(torch, torch_name(target)))
    if not bool((torch.isfinite(converted.float()) | ~torch.isfinite(values.float())).all()):
        largest = values[torch.isfinite(values.float())].double().abs().max().item()
        raise ValueError(f"{name} has a value of {largest:.6g}, which does not fit {torch_name(target)}")
    size = item_size(target)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return converted.view(signed).numpy().view(f"u{size}")
