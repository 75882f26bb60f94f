"""Triton kernels of sampling, penalties, masks and log-probabilities."""
