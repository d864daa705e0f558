"""The operations as torch custom ops, one file per family: shapes for tracing, and gradients."""
