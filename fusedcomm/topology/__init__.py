"""Which ranks can address each other, over which links, and what a collective costs there."""

from fusedcomm.topology.links import Link
from fusedcomm.topology.model import Topology

__all__ = ["Link", "Topology"]
