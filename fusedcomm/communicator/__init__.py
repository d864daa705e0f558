"""A process group whose ranks share memory, or do in parts."""

from fusedcomm.communicator.communicator import Communicator

__all__ = ["Communicator"]
