"""Runs a pipeline's schedule as events, and a long run with failures, from times that the cost model predicts."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np


def pipeline_makespan(forward: np.ndarray, backward: np.ndarray, micro_batches: int, message: float = 0.0) -> float:
    """Returns the seconds of a 1F1B schedule (Narayanan et al. 2019, section 3.2) from its events.

    An event is a pass of one micro-batch through one stage. It begins when the stage has ended its previous event and
    the message from the neighbor is there. Replicas of a pipeline are further rows: with stragglers each has its own
    times, and the slowest decides.

    Args:
        forward, backward: Seconds of a micro-batch's passes, [replicas, stages].
        message: Seconds of a message between two stages.
    """
    replicas, stages = forward.shape
    ended = np.zeros((2, stages, micro_batches, replicas))  # by kind: 0 forward, 1 backward
    free = np.zeros((stages, replicas))
    waiting = [_order(stage, stages, micro_batches) for stage in range(stages)]
    done, place = [[0, 0] for _ in range(stages)], [0] * stages
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        while place[stage] < len(waiting[stage]):
            kind, batch = waiting[stage][place[stage]]
            source = stage - 1 if kind == 0 else stage + 1
            if 0 <= source < stages and done[source][kind] <= batch:
                break
            arrived = ended[kind, source, batch] + message if 0 <= source < stages else 0.0
            own = (forward, backward)[kind][:, stage]
            ended[kind, stage, batch] = free[stage] = np.maximum(free[stage], arrived) + own
            done[stage][kind] += 1
            place[stage] += 1
            ready.extend(other for other in (stage - 1, stage + 1) if 0 <= other < stages)
    return float(free.max())


def _order(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """Returns a stage's events under 1F1B: some forward passes, then one of each in turn, then backward passes."""
    early = min(stages - stage - 1, micro_batches)
    events = [(0, batch) for batch in range(early)]
    for batch in range(early, micro_batches):
        events += [(0, batch), (1, batch - early)]
    return events + [(1, batch) for batch in range(micro_batches - early, micro_batches)]


def ring_seconds(size: float, bandwidths: np.ndarray, latency: float) -> float:
    """Returns the seconds of a ring all-reduce from its messages, with the bandwidth of each rank's link, [ranks].

    In each of 2 (r - 1) rounds a rank sends the part that it received in the round before.
    """
    ranks = len(bandwidths)
    at = np.zeros(ranks)
    for _ in range(2 * (ranks - 1)):
        sent = at + size / ranks / bandwidths + latency
        at = np.maximum(sent, np.roll(sent, 1))  # a rank has sent its part and received its neighbor's
    return float(at.max())


@dataclass(frozen=True)
class Failures:
    """What interrupts a run.

    Attributes:
        device_mtbf: Mean seconds between the failures of one device.
        save: Seconds that a save stops training.
        restart: Seconds from a failure to the first repeated step.
    """

    device_mtbf: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        if not (self.device_mtbf > 0 and self.save > 0 and self.restart >= 0):
            raise ValueError(f"device_mtbf and save must be above 0 and restart at least 0, not {self}")


def save_interval(failures: Failures, devices: int) -> float:
    """Returns the seconds of training between two saves that lose least: Daly (2006), equation 37, else the mean."""
    mean, save = failures.device_mtbf / devices, failures.save
    if save >= 2 * mean:
        return mean
    return sqrt(2 * save * mean) * (1 + sqrt(save / (2 * mean)) / 3 + save / (18 * mean)) - save


def useful_share(failures: Failures, devices: int, interval: float, *, seconds: float, seed: int = 0) -> float:
    """Returns the share of a run's time that moves it forward, by drawing failures.

    A failure loses what was trained since the last save, and the restart; a failure within a restart begins it again.
    """
    draw = np.random.default_rng(seed)
    mean, period = failures.device_mtbf / devices, interval + failures.save
    clock = useful = 0.0
    while clock < seconds:
        lived = draw.exponential(mean)
        useful += lived // period * interval
        clock += lived
        while (again := draw.exponential(mean)) < failures.restart:
            clock += again
        clock += failures.restart
    return useful / clock
