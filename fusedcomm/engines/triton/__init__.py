"""The overlapped engine whose waits and signals are in its kernels (the package's ``kernels/``).

On CPU tensors it runs the very device code in Triton's interpreter (``TRITON_INTERPRET=1``), with
real ranks on real shared memory: slow, and made for debugging.
"""
