"""Typed messages, and the channels and nodes that carry them between the parts of a Tercet server."""
