"""CUDA graphs of steps: their inputs, their capture, and the steps that run before the first request."""
