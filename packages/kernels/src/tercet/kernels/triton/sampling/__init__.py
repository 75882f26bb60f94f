"""Triton kernels: sampling, penalties, masks and log-probabilities."""
