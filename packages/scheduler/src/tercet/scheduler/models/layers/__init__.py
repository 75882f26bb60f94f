"""Layers of the model families, sharded over ranks, and the operations they call."""
