"""Layers that families are built of, sharded over ranks, and the operations they call."""
