"""The exceptions of the library.

Wrong input is a plain ``ValueError`` and is raised before anything is sent. A ``FusedcommError`` is
about other ranks; after one of them the communicator is unusable and says so.
"""

from __future__ import annotations


class FusedcommError(RuntimeError):
    """Base of every error that concerns other ranks."""


class PeerLostError(FusedcommError):
    """A rank that this one waits for has died or has closed its communicator."""


class PeerTimeoutError(FusedcommError):
    """A rank that this one waits for did not come within the communicator's ``timeout_s``."""


class MismatchError(FusedcommError):
    """Ranks disagree on the current call: another operation, shape, dtype or order of calls."""


class AbortedError(FusedcommError):
    """A rank called ``Communicator.abort``, or failed in the middle of a call."""


class ClosedError(FusedcommError):
    """The communicator was closed, or an earlier error made it unusable."""


class SharedMemoryError(FusedcommError, MemoryError):
    """The operating system would not give the shared memory that a call needs."""


class CapacityError(ValueError):
    """Tokens were routed to a rank that has no room for them; raised on every rank alike.

    It is known before a row is sent. On CPUs it is raised by the call itself, and the communicator
    goes on working. On GPUs the host does not wait for the routing: it is raised by a later call,
    and the communicator is unusable, as after the errors that concern other ranks.
    """

    @classmethod
    def at(cls, reader: int, rows: int, capacity: int) -> CapacityError:
        """For the rank that would receive too many rows."""
        return cls(
            f"rank {reader} would receive {rows} rows, padding included, but capacity is "
            f"{capacity}: raise it, or choose overflow='drop'"
        )
