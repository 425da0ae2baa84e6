"""Devices, the links between them, and the nodes that they form, as their vendors publish them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        peak: Dense 16-bit matrix products with fp32 sums, in FLOP/s.
        memory: Bytes of device memory.
        bandwidth: Bytes per second from and to device memory.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """A link of one device, or of one node.

    Attributes:
        bandwidth: Bytes per second in one direction.
        latency: Seconds for a message without content.
        groups: In a node without a switch, the share of the bandwidth that leads to the others of a group of so many.
    """

    name: str
    bandwidth: float
    latency: float
    groups: tuple[tuple[int, float], ...] = ()

    def within(self, ranks: int) -> Link:
        """Returns the link as a group of `ranks` neighbors sees it."""
        return replace(self, bandwidth=self.bandwidth * dict(self.groups).get(ranks, 1.0))


NVLINK_LATENCY, NETWORK_LATENCY = 3e-6, 8e-6
GB, GIB, TFLOPS = 1e9, 2**30, 1e12

LINKS = {
    link.name: link
    for link in (
        Link("nvlink2", 150 * GB, NVLINK_LATENCY, ((2, 1 / 6), (4, 4 / 6))),  # V100: 6 x 25 GB/s, DGX-1's cube mesh
        Link("nvlink3", 300 * GB, NVLINK_LATENCY),  # A100: 12 x 25 GB/s
        Link("nvlink4", 450 * GB, NVLINK_LATENCY),  # H100, H200: 18 x 25 GB/s
        Link("nvlink5", 900 * GB, NVLINK_LATENCY),  # B200: 18 x 50 GB/s
        Link("infinity-fabric", 448 * GB, NVLINK_LATENCY, ((2, 1 / 7), (4, 3 / 7))),  # MI300X: 7 x 64 GB/s
        Link("shared-memory", 4 * GB, 50e-6),  # between processes, by gloo
        Link("pcie3", 16 * GB, NETWORK_LATENCY),
        Link("pcie4", 32 * GB, NETWORK_LATENCY),
        Link("pcie5", 64 * GB, NETWORK_LATENCY),
        Link("infiniband-edr", 12.5 * GB, NETWORK_LATENCY),  # 100 Gb/s, as Omni-Path
        Link("infiniband-hdr", 25 * GB, NETWORK_LATENCY),  # 200 Gb/s
        Link("infiniband-ndr", 50 * GB, NETWORK_LATENCY),  # 400 Gb/s
    )
}

DEVICES = {
    device.name: device
    for device in (
        Device("v100", 125 * TFLOPS, 32 * GIB, 900 * GB),
        Device("a100-40gb", 312 * TFLOPS, 40 * GIB, 1555 * GB),
        Device("a100", 312 * TFLOPS, 80 * GIB, 2039 * GB),
        Device("h100", 989 * TFLOPS, 80 * GIB, 3350 * GB),
        Device("h200", 989 * TFLOPS, 141 * GIB, 4800 * GB),
        Device("b200", 2250 * TFLOPS, 180 * GIB, 8000 * GB),
        Device("cpu", 0.1 * TFLOPS, 8 * GIB, 10 * GB),  # a process with one or two cores, in fp32
        Device("mi300x", 1307 * TFLOPS, 192 * GIB, 5300 * GB),
    )
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
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

    def link(self, ranks: int, stride: int) -> Link:
        """Returns the link of each rank of a ring over `ranks` ranks that are `stride` apart.

        A node of n devices holds k = n / stride ranks of the ring, and n / k rings cross its network at once. So each
        ring has the k-th part of all adapters: k adapters of n.
        """
        if ranks * stride <= self.node_size:
            return self.inside.within(ranks) if stride == 1 else self.inside
        held = max(self.node_size // stride, 1)
        share = self.network.bandwidth * self.adapters * held / self.node_size
        return replace(self.network, bandwidth=min(share, self.inside.bandwidth))


CLUSTERS = {
    "v100": Cluster(DEVICES["v100"], LINKS["nvlink2"], LINKS["infiniband-edr"], adapters=4),  # DGX-1
    "a100-40gb": Cluster(DEVICES["a100-40gb"], LINKS["nvlink3"], LINKS["infiniband-hdr"]),  # DGX A100
    "a100": Cluster(DEVICES["a100"], LINKS["nvlink3"], LINKS["infiniband-hdr"]),
    "h100": Cluster(DEVICES["h100"], LINKS["nvlink4"], LINKS["infiniband-ndr"]),  # DGX H100
    "h200": Cluster(DEVICES["h200"], LINKS["nvlink4"], LINKS["infiniband-ndr"]),
    "b200": Cluster(DEVICES["b200"], LINKS["nvlink5"], LINKS["infiniband-ndr"]),
    "cpu": Cluster(DEVICES["cpu"], LINKS["shared-memory"], LINKS["infiniband-edr"], adapters=1),
    "mi300x": Cluster(DEVICES["mi300x"], LINKS["infinity-fabric"], LINKS["infiniband-ndr"]),
}


def cluster_of(
    device: str,
    *,
    inside: str | None = None,
    network: str | None = None,
    node_size: int = 8,
    adapters: int | None = None,
) -> Cluster:
    """Returns nodes of a device, with the links of its usual server or others. ValueError for a name not in a table."""
    for name, table in ((device, CLUSTERS), (inside, LINKS), (network, LINKS)):
        if name is not None and name not in table:
            raise ValueError(f"there is no {name!r}; use one of {', '.join(table)}")
    if node_size < 1 or (adapters is not None and adapters < 1):
        raise ValueError(f"a node needs at least 1 device and 1 adapter, not {node_size} and {adapters}")
    usual = CLUSTERS[device]
    return replace(
        usual,
        inside=LINKS[inside] if inside else usual.inside,
        network=LINKS[network] if network else usual.network,
        node_size=node_size,
        adapters=adapters or usual.adapters,
    )
