"""Shared by the mpu tests: the independent way to cut a tensor, and tolerances."""

from __future__ import annotations

import pytest
import torch
from every_case import examples
from hypothesis import HealthCheck, Phase, settings

# Examples are few because each one runs on several processes; derandomized so that a failure repeats; not shrunk,
# because every hang would cost seconds again.
settings.register_profile(
    "ranks",
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ranks")


def cut(tensor, dim, rank, size, groups=None):
    """Rank's part of each block along `dim`, written without `Shard`: of ten features over four ranks 3, 2, 3, 2."""
    blocks = tensor.split(list(groups) if groups else tensor.shape[dim], dim)
    parts = [
        [i for i in range(block.shape[dim]) if i * size // block.shape[dim] == rank]
        for block in blocks
    ]
    return torch.cat(
        [block.narrow(dim, part[0], len(part)) for block, part in zip(blocks, parts, strict=True)],
        dim,
    )


def close(actual, expected):
    """The project's fp32 tolerance. Exact zeros included, because -0.0 == 0.0."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def distance(actual, exact):
    """Relative 2-norm of the error."""
    return float((actual.double() - exact).norm() / exact.norm())


class Helpers:
    """What the test modules need; they cannot import this file."""

    cut = staticmethod(cut)
    close = staticmethod(close)
    distance = staticmethod(distance)


@pytest.fixture(scope="session")
def helpers():
    return Helpers
