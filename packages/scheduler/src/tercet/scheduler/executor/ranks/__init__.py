"""Tensor parallelism: rank processes, their messages and collectives."""
