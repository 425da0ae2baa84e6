"""Estimates how much memory training takes, without running it: see docs/estimate.md."""

from .estimate import Estimate, estimate, estimate_stages, largest_micro_batch
from .model import Job
from .pipeline import Partition, bubble, choose_blocks, in_flight

__all__ = [
    "Estimate",
    "Job",
    "Partition",
    "bubble",
    "choose_blocks",
    "estimate",
    "estimate_stages",
    "in_flight",
    "largest_micro_batch",
]
