"""Weights that frontends send, or that a trainer broadcasts, until an ordinary update can load them."""
