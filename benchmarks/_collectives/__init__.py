"""What the benchmark of collectives is made of."""
