"""Checkpoints: tensor names, quantized formats, and loading into modules."""
