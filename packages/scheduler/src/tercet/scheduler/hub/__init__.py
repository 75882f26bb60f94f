"""The hub's cache on this machine: downloads, and the list of models."""
