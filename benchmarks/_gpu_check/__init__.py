"""What ``make gpu-check`` runs on a machine with an NVIDIA GPU: checks, then measurements.

It needs that machine's own torch (2.11 or later) and triton (3.6 or later), and nothing else.
"""
