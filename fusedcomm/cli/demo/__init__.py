"""``python -m fusedcomm demo``: a real language model, tensor-parallel on overlapped layers.

======================  ===================================================
llama.py                the model, as one rank computes it: the one to read
sharding.py             which part of the weights a rank holds
reference.py            the unsharded models it is compared with
worker.py, timing.py    what a rank does, and how it times the projections
findings.py, report.py  how that is judged and shown
command.py              the options, and the run from start to end
======================  ===================================================
"""

from fusedcomm.cli.demo.command import add_arguments, run

__all__ = ["add_arguments", "run"]
