"""Triton kernels: mixtures of experts."""
