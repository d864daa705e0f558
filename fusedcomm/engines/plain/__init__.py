"""torch.distributed's collective, then the GEMM: no overlap, any backend, any distance."""
