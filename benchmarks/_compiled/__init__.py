"""Kernels as compiled for GPUs, on a machine without one: ``python -m benchmarks._compiled``.

Every case of ``cases.py`` (a kernel with its signature, constants and tiles) is compiled for every
chip, its machine code is read, measured and held to the rules of docs/kernels.md.

============== ===================================================================================
``cases``      which kernels, for which chips, with which tiles; what each must contain
``compiling``  ``triton.compile`` for a named chip, in several processes; the disassembly
``code``       a program as instructions and basic blocks: loops, paths, what precedes what
``sass``       NVIDIA's disassembly as such a program; ``gcn``: AMD's assembly
``measures``   the numbers of the report: instructions a K step, prefetch depth, spills ...
``checks``     the rules; each names what it found
``report``     the table
============== ===================================================================================

Nothing here imports torch or ``fusedcomm``: it also runs where only triton and numpy are installed.
"""
