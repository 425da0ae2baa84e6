"""Saves the states of all random generators of a process as tensors, and restores them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def random_state_tensors() -> dict[str, Tensor]:
    """Returns the states of all random generators, for `restore_random_state`."""
    version, internal, gauss = random.getstate()
    assert version == 3
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert name == "MT19937"
    tensors = {
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_random_state(tensors: dict[str, Tensor]) -> None:
    """Restores the states that `random_state_tensors` returned."""
    gauss = [*tensors["python_gauss"].tolist(), None][0]  # at most one number was kept
    random.setstate((3, tuple(tensors["python"].tolist()), gauss))
    position, has_gauss = tensors["numpy_position"].tolist()
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, tensors["numpy_gauss"].item()))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
