"""Devices, the links between them, and the nodes that they form, as their vendors publish them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ..files.printable import describe
from ..files.strict_yaml import read_strict_yaml


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        peak: Dense 16-bit matrix products with fp32 sums, in FLOP/s.
        memory: Bytes of device memory.
        bandwidth: Bytes per second from and to device memory.
        peak_fp32: Matrix products of fp32 (not TF32, which the trainer does not turn on), in
            FLOP/s.
        sustained: Share of the peaks that long products keep up under the device's power limit,
            relative to an A100.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float
    peak_fp32: float
    sustained: float = 1.0

    def peak_flops(self, itemsize: int) -> float:
        """Returns the FLOP/s of products of elements of 2 or 4 bytes."""
        return self.peak if itemsize == 2 else self.peak_fp32


@dataclass(frozen=True)
class Link:
    """A link of one device, or of one node.

    Attributes:
        bandwidth: Bytes per second in one direction.
        latency: Seconds for a message without content.
        groups: In a node without a switch, for some sizes of groups, the share of the bandwidth
            that leads to the others of such a group.
    """

    name: str
    bandwidth: float
    latency: float
    groups: tuple[tuple[int, float], ...] = ()

    def within(self, ranks: int) -> Link:
        """Returns the link as a group of `ranks` neighbors sees it."""
        return replace(self, bandwidth=self.bandwidth * dict(self.groups).get(ranks, 1.0))


NVLINK_LATENCY = 3e-6  # seconds
NETWORK_LATENCY = 8e-6  # seconds
GB = 1e9
GIB = 2**30
TFLOPS = 1e12

LINKS = {
    link.name: link
    for link in (
        # V100: 6 x 25 GB/s in DGX-1's cube mesh.
        Link("nvlink2", 150 * GB, NVLINK_LATENCY, ((2, 1 / 6), (4, 4 / 6))),
        # A100: 12 x 25 GB/s.
        Link("nvlink3", 300 * GB, NVLINK_LATENCY),
        # H100 and H200: 18 x 25 GB/s.
        Link("nvlink4", 450 * GB, NVLINK_LATENCY),
        # B200: 18 x 50 GB/s.
        Link("nvlink5", 900 * GB, NVLINK_LATENCY),
        # MI300X: 7 x 64 GB/s.
        Link("infinity-fabric", 448 * GB, NVLINK_LATENCY, ((2, 1 / 7), (4, 3 / 7))),
        # Between processes of one machine, by gloo.
        Link("shared-memory", 4 * GB, 50e-6),
        Link("pcie3", 16 * GB, NETWORK_LATENCY),
        Link("pcie4", 32 * GB, NETWORK_LATENCY),
        Link("pcie5", 64 * GB, NETWORK_LATENCY),
        # 100 Gb/s, as Omni-Path has.
        Link("infiniband-edr", 12.5 * GB, NETWORK_LATENCY),
        # 200 Gb/s.
        Link("infiniband-hdr", 25 * GB, NETWORK_LATENCY),
        # 400 Gb/s.
        Link("infiniband-ndr", 50 * GB, NETWORK_LATENCY),
    )
}

DEVICES = {
    device.name: device
    for device in (
        Device("v100", 125 * TFLOPS, 32 * GIB, 900 * GB, 15.7 * TFLOPS),
        Device("a100-40gb", 312 * TFLOPS, 40 * GIB, 1555 * GB, 19.5 * TFLOPS),
        Device("a100", 312 * TFLOPS, 80 * GIB, 2039 * GB, 19.5 * TFLOPS),
        Device("h100", 989 * TFLOPS, 80 * GIB, 3350 * GB, 67 * TFLOPS, sustained=0.71),
        # An H200 is an H100 with other memory.
        Device("h200", 989 * TFLOPS, 141 * GIB, 4800 * GB, 67 * TFLOPS, sustained=0.71),
        Device("b200", 2250 * TFLOPS, 180 * GIB, 8000 * GB, 80 * TFLOPS),
        # A process with one or two cores.
        Device("cpu", 0.1 * TFLOPS, 8 * GIB, 10 * GB, 0.1 * TFLOPS),
        Device("mi300x", 1307 * TFLOPS, 192 * GIB, 5300 * GB, 163.4 * TFLOPS),
    )
}


@dataclass(frozen=True)
class Rates:
    """What a device and its links reach of their figures.

    The defaults are fitted to published runs (benchmarks/published_runs.py) or, for `launch`,
    assumed; `calibrate` measures all of them on a machine (calibration.py).

    Attributes:
        compute: Share of the peak that large products reach.
        attention: Share of the peak that fused attention reaches.
        memory: Share of the memory's bandwidth that elementwise kernels reach.
        update: Share of the memory's bandwidth that clipping and the optimizer reach.
        link: Share of a link's bandwidth that collectives reach.
        overlap: Share of the last backward pass behind which gradients are reduced.
        launch: Seconds that the host needs to launch one kernel.
        dropout: Seconds to draw one element of a dropout mask, if reading and writing the elements
            does not hide it.
        step: Seconds of an optimizer step that do not depend on the model.
        asynchronous: Whether the device computes while the host launches further kernels.
    """

    compute: float = 0.8
    attention: float = 0.31
    memory: float = 0.92
    update: float = 0.92
    link: float = 0.8
    overlap: float = 0.17
    launch: float = 6e-6
    dropout: float = 0.0
    step: float = 0.0
    asynchronous: bool = True


FITTED = Rates()


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        rates: What the devices and links reach of their figures.
        inside: The link of a device to the others of its node.
        network: One network adapter.
        node_size: Devices in a node.
        adapters: Network adapters of a node.
    """

    device: Device
    inside: Link
    network: Link
    node_size: int = 8
    adapters: int = 8
    rates: Rates = FITTED

    def link(self, ranks: int, stride: int) -> Link:
        """Returns the link of each rank of a ring over `ranks` ranks that are `stride` apart.

        A node of n devices holds k = n / stride ranks of the ring, and n / k rings cross its
        network at once. So each ring has the k-th part of all adapters: k adapters of n.
        """
        if ranks * stride <= self.node_size:
            return self.inside.within(ranks) if stride == 1 else self.inside
        held = max(self.node_size // stride, 1)
        share = self.network.bandwidth * self.adapters * held / self.node_size
        return replace(self.network, bandwidth=min(share, self.inside.bandwidth))


CLUSTERS = {
    # DGX-1.
    "v100": Cluster(DEVICES["v100"], LINKS["nvlink2"], LINKS["infiniband-edr"], adapters=4),
    # DGX A100.
    "a100-40gb": Cluster(DEVICES["a100-40gb"], LINKS["nvlink3"], LINKS["infiniband-hdr"]),
    "a100": Cluster(DEVICES["a100"], LINKS["nvlink3"], LINKS["infiniband-hdr"]),
    # DGX H100.
    "h100": Cluster(DEVICES["h100"], LINKS["nvlink4"], LINKS["infiniband-ndr"]),
    "h200": Cluster(DEVICES["h200"], LINKS["nvlink4"], LINKS["infiniband-ndr"]),
    "b200": Cluster(DEVICES["b200"], LINKS["nvlink5"], LINKS["infiniband-ndr"]),
    "cpu": Cluster(DEVICES["cpu"], LINKS["shared-memory"], LINKS["infiniband-edr"], adapters=1),
    "mi300x": Cluster(DEVICES["mi300x"], LINKS["infinity-fabric"], LINKS["infiniband-ndr"]),
}


UNITS = {"peak": TFLOPS, "peak_fp32": TFLOPS, "memory": GIB, "bandwidth": GB}
"""Units of a device's figures in flags and files: TFLOP/s, GiB and GB/s."""
FILES = (".yaml", ".yml")
LINK_NAMES = ("inside", "network")
LARGEST_FIGURE = 1e9
DIVISORS = ("compute", "attention", "memory", "update", "link")
"""Rates by which something is divided, so that they cannot be 0."""


def find_cluster(device: str, **changes: Any) -> Cluster:
    """Returns nodes of a device, as its usual server has them or with changes.

    Args:
        device: A name in `CLUSTERS`, or a YAML file with some of the keys of `changes`, and
            `device` if it starts from a name.
        changes: `peak` and `peak_fp32` in TFLOP/s, `sustained`, `memory` in GiB, `bandwidth` in
            GB/s, `inside` and `network` as a name in `LINKS` or in GB/s, `node_size`, `adapters`;
            None leaves a value. A file may also have `rates`, the fields of `Rates`, and a link as
            its `bandwidth` in GB/s and `latency` in seconds.

    Raises:
        ValueError: A name is not in its table, or a value is not above 0.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    if device.endswith(FILES):
        device, from_file = _read_device_file(Path(device))
        changes = from_file | changes
    changes = {name: value for name, value in changes.items() if value is not None}
    usual = CLUSTERS[_check_name(device, CLUSTERS)]
    rates = _parse_rates(changes.pop("rates", {}))
    for name in changes.keys() - set(LINK_NAMES):
        _check_number(name, changes[name], whole=name in ("node_size", "adapters"))
    if changes.get("sustained", 1) > 1:
        raise ValueError(
            f"sustained is a share of the peak, at most 1, not {changes['sustained']!r}"
        )
    figures: dict[str, float] = {}
    for name, unit in (UNITS | {"sustained": 1.0}).items():
        if name in changes:
            figures[name] = changes.pop(name) * unit
    links: dict[str, Link] = {}
    for name in LINK_NAMES:
        if name in changes:
            links[name] = _parse_link(name, changes.pop(name), getattr(usual, name))
    return replace(usual, device=replace(usual.device, **figures), rates=rates, **links, **changes)


def _check_number(name: str, value: Any, *, whole: bool = False, zero: bool = False) -> None:
    """Raises ValueError if a value is not a number above 0 (with `zero`: from 0) and not too large."""
    types = (int,) if whole else (int, float)
    lowest_is_met = type(value) in types and (value >= 0 if zero else value > 0)
    if not lowest_is_met or not value < LARGEST_FIGURE:
        kind = "whole number" if whole else "number"
        start = "from" if zero else "above"
        raise ValueError(
            f"{name} must be a {kind} {start} 0 and below {LARGEST_FIGURE:g}, not {reprlib.repr(value)}"
        )


def _check_name(name: str, table: Mapping[str, Any]) -> str:
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"there is no {reprlib.repr(name)}; use one of {', '.join(table)}")
    return name


def _parse_rates(values: Any) -> Rates:
    names = [field.name for field in fields(Rates)]
    if not isinstance(values, dict) or not set(values) <= set(names):
        raise ValueError(f"rates are some of {', '.join(names)}, not {reprlib.repr(values)}")
    for name, value in values.items():
        if name != "asynchronous":
            _check_number(name, value, zero=name not in DIVISORS)
        elif not isinstance(value, bool):
            raise ValueError(f"asynchronous must be true or false, not {reprlib.repr(value)}")
    return Rates(**values)


def _parse_link(name: str, value: str | float | dict[str, Any], usual: Link) -> Link:
    """Returns a link of the table, or one of so many GB/s.

    Its latency is the usual link's, or its own in a mapping of `bandwidth` and `latency`.
    """
    if isinstance(value, dict) and set(value) == {"bandwidth", "latency"}:
        _check_number(f"{name}'s latency", value["latency"], zero=True)
        link = _parse_link(name, value["bandwidth"], usual)
        return replace(link, latency=float(value["latency"]))
    try:
        speed = float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        speed = inf
    except (TypeError, ValueError):
        return LINKS[_check_name(str(value), LINKS)]
    if isinstance(value, bool) or not (speed > 0 and isfinite(speed)):
        raise ValueError(f"{name} must be a link's name or GB/s above 0, not {reprlib.repr(value)}")
    return Link(f"{speed:g} GB/s", speed * GB, usual.latency)


def _read_device_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the device that a file starts from, and the changes.

    Raises:
        ValueError: The file is no YAML, has an unknown key, or describes only a part of a device.
    """
    values = read_strict_yaml(path, "--device")
    known = ("device", *UNITS, "sustained", *LINK_NAMES, "node_size", "adapters", "rates")
    described = f"{path} describes a device by {', '.join(known)}"
    if not isinstance(values, dict):
        raise ValueError(f"{described}, not by {reprlib.repr(values)}")
    if not set(values) <= set(known):
        unknown = sorted(map(describe, set(values) - set(known)))
        raise ValueError(f"{described}, not by [{', '.join(unknown[:5])}]")
    needed = (*UNITS, *LINK_NAMES)
    if "device" not in values:
        if not set(needed) <= set(values):
            raise ValueError(f"{path} needs a device to start from, or all of {', '.join(needed)}")
        values.setdefault("sustained", 1.0)
    return values.pop("device", "h100"), values
