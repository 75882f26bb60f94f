"""Cores of several attention ranks, which plan steps together (`--enable-dp-attention`)."""
