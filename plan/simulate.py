"""Runs a step as events over ranks and links, and a long run with failures, on the cost model's
times.

An event is a pass of one micro-batch through one stage of a replica, a message between stages, or
one round of a ring. Ranks that wait for each other at every event are one row of an array: the
tensor-parallel ranks of a stage leave each all-reduce together. So a step of 10,000 ranks is some
thousand operations on arrays.

Arrays have the dimensions M micro-batches, P pipeline stages, D replicas, T tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from .cost import Network, PlannedRun, gradient_ring, message_time, stage_times, update_time
from .hardware import Cluster

LONGEST_RESTART = 3.0
"""Mean times between failures that a restart and a save may take; above, hardly any succeeds."""
FAILURES = 1000
"""Failures by which intervals are compared, and the most that are drawn; longer runs are scaled up.
"""
INTERVALS = np.geomspace(0.25, 2.5, 24)
"""Intervals between saves that are tried, as multiples of Daly's."""


@dataclass(frozen=True)
class Stragglers:
    """How the ranks' times differ.

    Attributes:
        slow_share: Probability that a device is slow during a step.
        slowdown: How many times as long a slow device needs.
        jitter: Standard deviation of the logarithm of each pass's time on each device; the mean
            stays the same.
    """

    slow_share: float = 0.0
    slowdown: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("slow_share", 0, 1), ("slowdown", 1, 1000), ("jitter", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, not {getattr(self, name)}")


NO_STRAGGLERS = Stragglers()


def simulate_step(
    network: Network,
    run: PlannedRun,
    cluster: Cluster,
    stragglers: Stragglers = NO_STRAGGLERS,
    seed: int = 0,
) -> float:
    """Returns the seconds of a step from its events.

    Raises:
        ValueError: The schedule is interleaved, which is not simulated.
    """
    if run.chunks > 1:
        raise ValueError(
            f"the simulated schedule is 1F1B, with 1 group of layers on a rank, not {run.chunks}"
        )
    draw = np.random.default_rng(seed)
    stages = stage_times(network, run, cluster)
    # Context-parallel ranks leave each exchange together, as tensor-parallel ones do.
    together = run.tensor * run.context
    is_slow = draw.random((run.pipeline, run.data, together)) < stragglers.slow_share
    slowness = np.where(is_slow, stragglers.slowdown, 1.0)  # [P, D, T]
    busy = np.array([sum(stage.busy) for stage in stages])  # [P]
    tensor = np.array([stage.exchanges for stage in stages])  # [P]
    forward_shares = np.array([stage.forward for stage in stages]).T  # [2, P]

    def draw_passes(shares: np.ndarray) -> np.ndarray:
        """Returns the seconds of all passes in one direction, [M, P, D]."""
        computing = _draw_times(
            busy * shares[0], slowness, stragglers.jitter, run.micro_batches, draw
        )
        return computing + (tensor * shares[1])[:, None]

    forward = draw_passes(forward_shares)
    backward = draw_passes(1 - forward_shares)
    if run.exchanges_each_pass:
        # Replicas exchange weights or gradients in each pass, so the slowest one decides.
        forward = forward.max(-1, keepdims=True)
        backward = backward.max(-1, keepdims=True)
    message = message_time(network, run, cluster) / 2
    ended = pipeline_ends(forward, backward, message)  # [P, D]

    ring, rounds = gradient_ring(network, run, cluster)
    # What the last backward pass, two thirds of a micro-batch's time, hides of the reduction.
    hidden = cluster.rates.overlap * 2 / 3 * busy[:, None] * slowness.max(-1)  # [P, D]
    if run.exchanges_each_pass:
        ended = ended + max(ring * rounds - run.micro_batches * hidden.max(), 0.0)
    elif run.data > 1:
        hops = np.full(run.data, ring / (2 * (run.data - 1)))
        ended = np.maximum(ended, ring_ends(ended - hidden, hops))
    elif run.context > 1:
        ended = ended + max(ring * rounds - hidden.max(), 0.0)
    return float(ended.max()) + update_time(network, run, cluster) + cluster.rates.step


def _draw_times(
    seconds: np.ndarray, slowness: np.ndarray, jitter: float, count: int, draw: np.random.Generator
) -> np.ndarray:
    """Returns the times of `count` passes through each stage, [M, P, D].

    The slowest tensor-parallel rank decides.

    Args:
        seconds: Of a pass through each stage, [P].
        slowness: How many times as long each device takes, [P, D, T].
    """
    if not jitter:
        alike = seconds[:, None] * slowness.max(-1)
        return np.broadcast_to(alike, (count, *slowness.shape[:2]))
    mean_of_logarithm = -(jitter**2) / 2  # The mean of the factors themselves is 1.
    slowest: list[np.ndarray] = []
    for _ in range(count):
        factors = draw.lognormal(mean_of_logarithm, jitter, slowness.shape)
        slowest.append((slowness * factors).max(-1))
    return seconds[:, None] * np.stack(slowest)


FORWARD = 0
BACKWARD = 1


def pipeline_ends(forward: np.ndarray, backward: np.ndarray, message: float = 0.0) -> np.ndarray:
    """Returns when each stage of each replica ends its last pass under 1F1B, [P, D].

    A pass begins when the stage is free and the neighbor's message is there. A stage is not free
    while it sends (Narayanan et al. 2019).

    Args:
        forward, backward: Seconds of each micro-batch's pass through each stage, [M, P, D].
        message: Seconds of a message between two stages.
    """
    micro_batches, stages, replicas = forward.shape
    durations = (forward, backward)
    sent = np.zeros((2, stages, micro_batches, replicas))  # when a pass's result has been sent
    free = np.zeros((stages, replicas))  # when a stage can begin its next pass
    events = [_list_events(stage, stages, micro_batches) for stage in range(stages)]
    passes_done = [[0, 0] for _ in range(stages)]
    next_event = [0] * stages
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        while next_event[stage] < len(events[stage]):
            kind, batch = events[stage][next_event[stage]]
            source = stage - 1 if kind == FORWARD else stage + 1
            target = stage + 1 if kind == FORWARD else stage - 1
            begun = free[stage]
            if 0 <= source < stages:
                if passes_done[source][kind] <= batch:
                    break  # The neighbor has not sent this micro-batch yet.
                begun = np.maximum(begun, sent[kind, source, batch])
            sending = message if 0 <= target < stages else 0.0
            free[stage] = begun + durations[kind][batch, stage] + sending
            sent[kind, stage, batch] = free[stage]
            passes_done[stage][kind] += 1
            next_event[stage] += 1
            ready.extend(other for other in (stage - 1, stage + 1) if 0 <= other < stages)
    return free


def _list_events(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """Returns a stage's passes under 1F1B, as pairs of direction and micro-batch.

    Some forward passes come first, then one of each direction in turn, then backward passes.
    """
    early = min(stages - stage - 1, micro_batches)
    events = [(FORWARD, batch) for batch in range(early)]
    for batch in range(early, micro_batches):
        events += [(FORWARD, batch), (BACKWARD, batch - early)]
    return events + [(BACKWARD, batch) for batch in range(micro_batches - early, micro_batches)]


def ring_ends(begun: np.ndarray, hops: np.ndarray) -> np.ndarray:
    """Returns when each rank of a ring ends an all-reduce, from its messages.

    In each of 2 (r - 1) rounds a rank sends the part that it received in the round before.

    Args:
        begun: When each rank begins, [..., ranks].
        hops: Seconds of each rank's link for a message, [ranks].
    """
    at = begun
    for _ in range(2 * (len(hops) - 1)):
        sent = at + hops
        # The round ends when a rank has sent its part and received its neighbor's.
        at = np.maximum(sent, np.roll(sent, 1, -1))
    return at


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
        if not 0 < self.device_mtbf < inf:
            raise ValueError(
                f"the mean time between a device's failures must be above 0 s, not {self.device_mtbf}"
            )
        if not 0 < self.save < inf:
            raise ValueError(f"a save must take more than 0 s, not {self.save}")
        if not 0 <= self.restart < inf:
            raise ValueError(f"a restart must take 0 s or more, not {self.restart}")


def young_interval(failures: Failures, devices: int) -> float:
    """Returns the seconds of training between two saves that lose least in first order:

    Young (1974).
    """
    return sqrt(2 * failures.save * failures.device_mtbf / devices)


def save_interval(failures: Failures, devices: int) -> float:
    """Returns the seconds of training between two saves that lose least:

    Daly (2006), equation 37, else the mean.
    """
    mean = failures.device_mtbf / devices
    save = failures.save
    if save >= 2 * mean:
        return mean
    return sqrt(2 * save * mean) * (1 + sqrt(save / (2 * mean)) / 3 + save / (18 * mean)) - save


@dataclass(frozen=True)
class RunForecast:
    """What a run takes with failures, in seconds, if it saves at the best of `INTERVALS`.

    Attributes:
        seconds: The mean of the drawn runs.
        late: One run in twenty takes longer.
        interval: Training between two saves.
        failures: Mean number of failures.
    """

    seconds: float
    late: float
    interval: float
    failures: float


def forecast_run(
    failures: Failures, devices: int, work: float, *, runs: int = 200, seed: int = 0
) -> RunForecast:
    """Forecasts a run of `work` seconds of training that is interrupted by failures.

    Long runs are drawn with each interval between saves, and then runs of `work` with the best one.

    Raises:
        ValueError: Failures come too often for a run to end.
    """
    mean = failures.device_mtbf / devices
    intervals = save_interval(failures, devices) * INTERVALS
    long = run_seconds(failures, devices, intervals, FAILURES * mean, runs=20, seed=seed)
    interval = intervals[[long.mean(1).argmin()]]
    drawn = min(work, FAILURES * mean)
    ended = run_seconds(failures, devices, interval, drawn, runs=runs, seed=seed) * (work / drawn)
    seconds = float(ended.mean())
    return RunForecast(seconds, float(np.quantile(ended, 0.95)), float(interval[0]), seconds / mean)


def run_seconds(
    failures: Failures,
    devices: int,
    intervals: np.ndarray,
    work: float,
    *,
    runs: int = 200,
    seed: int = 0,
) -> np.ndarray:
    """Returns how long runs of `work` seconds of training take with failures, [intervals, runs].

    A failure loses what was trained since the last save, and the restart; a failure within a
    restart begins it again. All intervals meet the same failures.
    """
    mean = failures.device_mtbf / devices
    draw = np.random.default_rng(seed)
    if failures.save + failures.restart > LONGEST_RESTART * mean:
        raise ValueError(
            f"{devices} devices fail every {mean:.3g} s, so a run whose save and restart take "
            f"{failures.save:.3g} s and {failures.restart:.3g} s makes no progress; use fewer "
            "devices, or ones that fail less often"
        )
    left = np.full((len(intervals), runs), float(work))
    clock = np.zeros_like(left)
    ended = np.full_like(left, inf)
    every = intervals[:, None]
    while np.isinf(ended).any():
        lived = draw.exponential(mean, runs)
        last = left * (every + failures.save) / every
        ended = np.where(np.isinf(ended) & (lived >= last), clock + last, ended)
        left = left - lived // (every + failures.save) * every
        clock = clock + lived + _restart(failures.restart, mean, runs, draw)
    return ended


def _restart(restart: float, mean: float, runs: int, draw: np.random.Generator) -> np.ndarray:
    """Returns the seconds until the restarts succeed, [runs]."""
    lost = np.zeros(runs)
    failed = np.arange(runs)
    while len(failed):
        again = draw.exponential(mean, len(failed))
        fails_again = again < restart
        failed = failed[fails_again]
        lost[failed] += again[fails_again]
    return lost + restart
