"""Estimates how much memory training takes, without running it: see docs/estimate.md."""

from .estimate import Estimate, estimate, largest_micro_batch
from .model import Job

__all__ = ["Estimate", "Job", "estimate", "largest_micro_batch"]
