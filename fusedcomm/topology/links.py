"""Classes of links, and what they can carry.

``bandwidth`` is what a kernel or a copy can use of the link, in bytes/s per direction, and
``latency_s`` the cost of one message or synchronisation over it. The figures of the table stand
until ``python -m fusedcomm bench --calibrate`` has measured this machine's.

============== ====================== ============ ==============================================
kind           bandwidth              latency      what it is
============== ====================== ============ ==============================================
shared-memory  16 GB/s, adds 24 GB/s  30 µs        CPU ranks of one machine; to be calibrated
nvswitch       links x the rate below 7 or 14 µs   every GPU to every other (5-9 µs on Hopper,
                                                   9-20 µs on Blackwell, for a synchronisation)
nvlink         links x the rate below 7 or 14 µs   a bundle between two GPUs
pcie           0.75 x the raw rate    10 µs        below one CPU; 48 GB/s for 16 lanes of PCIe 5
pcie-host      half of it             15 µs        through the link between two CPUs
network        0.9 x the raw rate     14 µs        45 GB/s for one 400 Gbit/s adapter a rank
tcp            1 GB/s                 300 µs       gloo between CPU ranks; to be calibrated
============== ====================== ============ ==============================================

An NVLink carries 18 GB/s on compute capability 6.x, 20 on 7.x and 8.0, 12 on 8.6, 20.6 on 9.x and
40.1 on 10.x, so 18 links are 371 GB/s on an H100 and 722 on a B200. The latencies of PCIe and the
shares of the raw rates are estimates.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GB = 1e9


@dataclass(frozen=True)
class Link:
    """What connects two ranks.

    Attributes:
        kind: a word of the table in this module, or one of the user's own.
        bandwidth: usable bytes/s per direction.
        latency_s: seconds that one message or synchronisation costs.
        reduce_rate: bytes/s of contributions that a rank adds up; None where that costs nothing
            beside moving them, as on a GPU.
    """

    kind: str
    bandwidth: float
    latency_s: float
    reduce_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.kind or not isinstance(self.kind, str):
            raise ValueError(f"a link's kind must be a word; got {self.kind!r}")
        for name in ("bandwidth", "latency_s", "reduce_rate"):
            value = getattr(self, name)
            if name == "reduce_rate" and value is None:
                continue
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"the {name} of link {self.kind!r} must be positive; got {value}")

    def __str__(self) -> str:
        return f"{self.kind} ({self.bandwidth / GB:.3g} GB/s, {self.latency_s * 1e6:.3g} µs)"

    def as_json(self) -> dict[str, Any]:
        """The link as JSON holds it."""
        return asdict(self)


def speed(link: Link) -> tuple[float, float]:
    """What links are compared by: of two that are equally wide, the later one is slower."""
    return link.bandwidth, -link.latency_s


SHARED_MEMORY = Link("shared-memory", 16 * GB, 30e-6, reduce_rate=24 * GB)
TCP = Link("tcp", 1 * GB, 300e-6)
NETWORK = Link("network", 45 * GB, 14e-6)
PCIE = Link("pcie", 48 * GB, 10e-6)
PCIE_HOST = Link("pcie-host", 24 * GB, 15e-6)

#: Usable share of a raw rate: PCIe loses packets' headers, a network some of the same.
_PCIE_SHARE, _NETWORK_SHARE = 0.75, 0.9
#: (from this compute capability on, GB/s of one NVLink per direction), highest first.
_NVLINK_RATES = ((100, 40.1), (90, 20.6), (86, 12.0), (70, 20.0), (60, 18.0))


def nvlink(count: int, capability: int, *, switched: bool) -> Link:
    """``count`` NVLinks of a GPU of that compute capability (90 for 9.0).

    Args:
        switched: they lead to a switch, which connects all GPUs; else to one other GPU.
    """
    rate = next((rate for least, rate in _NVLINK_RATES if capability >= least), 18.0)
    latency = 14e-6 if capability >= 100 else 7e-6
    return Link("nvswitch" if switched else "nvlink", count * rate * GB, latency)


def pcie(gigatransfers: float, lanes: int, *, across_hosts: bool = False) -> Link:
    """A PCIe path whose narrowest part has that rate per lane and that many lanes."""
    model = PCIE_HOST if across_hosts else PCIE
    raw = gigatransfers * lanes / 8 * GB
    bandwidth = raw * _PCIE_SHARE * (0.5 if across_hosts else 1.0)
    return Link(model.kind, bandwidth, model.latency_s)


def network(megabits: float) -> Link:
    """A network adapter of that raw rate in Mbit/s, used by one rank."""
    return Link("network", megabits * 1e6 / 8 * _NETWORK_SHARE, NETWORK.latency_s)


#: The words that ``Topology(links=…)`` takes in place of a ``Link``.
NAMED = {
    "shared-memory": SHARED_MEMORY,
    "tcp": TCP,
    "network": NETWORK,
    "pcie": PCIE,
    "pcie-host": PCIE_HOST,
    "nvswitch-h100": nvlink(18, 90, switched=True),
    "nvswitch-b200": nvlink(18, 100, switched=True),
    "nvswitch-a100": nvlink(12, 80, switched=True),
}


def as_link(value: Link | str) -> Link:
    """A link given as such or by one of the names in ``NAMED``.

    Raises:
        ValueError: there is no link of that name.
    """
    if isinstance(value, Link):
        return value
    found = NAMED.get(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            f"a link is a fusedcomm.topology.Link or one of {', '.join(NAMED)}; got {value!r}"
        )
    return found
