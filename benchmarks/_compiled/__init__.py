"""Compiles the device code for chips that are not there, and checks what came out.

``python -m benchmarks._compiled`` from the repository's root, or ``python -m fusedcomm bench
--compile-report``: a table for each chip, and what is wrong. The rules and why they are: see
docs/kernels.md.

Nothing here imports torch or the package ``fusedcomm``: Triton and numpy alone are enough, so that
it also runs beside a Triton that no release of torch goes with.

================== ===================================================================
cases.py           which kernels, and how they are compiled
compiling.py       calls Triton and the disassembler
program.py         machine code as a graph: blocks, paths, loops
sass.py, gcn.py    NVIDIA's and AMD's code: reading it, and what its instructions are
checks.py          the rules
report.py          all cases on all chips, the table, the JSON file
================== ===================================================================
"""
