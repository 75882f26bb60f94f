"""Triton kernels of mixtures of experts."""
