"""Stages of `tools/gpu_check.py`, one function each. A stage yields parts of its results as they are measured."""
