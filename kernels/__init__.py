"""Device code: one operation per file, Triton, importable as ``fusedcomm.kernels``.

Nothing here imports anything of ``fusedcomm``. ``signals.py`` holds the flags, ``tiles.py`` the
GEMM tile; every other file opens with its equation, its index spaces, and who raises which flag.
"""
