"""Seeds of the generators that are shared by a whole process, which tests draw from unless they make their own."""

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators; `seed` has at most 32 bits."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
