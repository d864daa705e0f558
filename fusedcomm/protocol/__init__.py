"""The signalling protocol: slots, epochs, ready and consumed flags.

A **workspace** is the memory of one kind of operation on one communicator. Every rank has a copy of
the same layout, in shared memory of its own::

    epoch[slot]                     how often this slot has been used; written by its own rank
    failed                          set by a rank that gave up (on GPUs, whose host does not wait)
    ready[slot][source][chunk]      set by ``source``, whose data this rank will read
    consumed[slot][reader]          set by ``reader`` when it has read what this rank wrote
    data[slot][bank][region]        ``region_bytes`` each

Every byte of data has one writer for as long as the workspace lives: one region where a rank writes
only into its own memory (and peers pull), one region per source where it writes into its peers'
(push). So it is enough that a writer awaits the readers of what it wrote itself, whatever the
shapes of the calls before.

A slot may have several **banks**. Its writer takes one for each use, and tells which in a word
beside ``ready`` that it writes before the flag; see ``rotation``.

A **shared** region is pushed into by all sources, each row at the place that the call's plan gives
it, so that a byte has one writer in a call but another one in the next. There a reader awaits
*every* source before it says consumed, to every source, also to those that sent it nothing. Then a
writer that has seen the reader's consumed knows that all others' writes of that call are done.

A call on slot ``s`` with epoch ``e``, in the order that makes it safe:

1. Before a rank writes, it awaits ``consumed[s][reader] >= e - 1`` of every reader.
2. It writes, then sets ``ready[s][me][chunk] = e`` on the reader, for a chunk with no rows too.
3. A reader awaits ``ready[s][source][chunk] >= e``, and reads.
4. When it has read all, it sets ``consumed[s][me] = e`` on the source.

Flags are set, never counted; one flag has one writer; nothing is ever reset. ``docs/protocol.md``
explains why this is safe; ``fusedcomm.testing.protocol_model`` checks it over all interleavings.
"""

from fusedcomm.protocol.call import Call, set_recorder
from fusedcomm.protocol.workspace import SLOTS, Space, Workspace

__all__ = ["SLOTS", "Call", "Space", "Workspace", "set_recorder"]
