"""Public differentiable functions."""
