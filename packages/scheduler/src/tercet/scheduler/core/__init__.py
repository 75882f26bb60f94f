"""Deterministic scheduling core, without torch, sockets, clocks or randomness."""
