"""The overlapped engine for CPU tensors: torch operations per chunk, on shared memory."""
