"""Predicts how long a training step takes on a cluster, and finds the fastest layout; see
docs/scale.md.
"""

from .cost import Network, PlannedRun, StepTime, step_time
from .hardware import CLUSTERS, Cluster, Device, Link, Rates, find_cluster

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Device",
    "Link",
    "Network",
    "PlannedRun",
    "Rates",
    "StepTime",
    "find_cluster",
    "step_time",
]
