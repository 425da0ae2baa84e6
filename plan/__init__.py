"""Predicts how long a training step takes on a cluster, and finds the fastest layout; see docs/scale.md."""

from .cost import Network, Run, StepTime, network_of, step_time
from .hardware import CLUSTERS, Cluster, Device, Link, Rates, cluster_of

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Device",
    "Link",
    "Network",
    "Rates",
    "Run",
    "StepTime",
    "cluster_of",
    "network_of",
    "step_time",
]
