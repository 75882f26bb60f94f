"""Attention over paged keys and values: the interface, a naive reference, and one module for each backend."""
