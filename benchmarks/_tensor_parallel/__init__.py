"""The paths that the benchmark tensor_parallel compares, by kind of case."""
