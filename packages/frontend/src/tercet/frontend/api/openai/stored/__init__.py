"""Stored chat completions: their store, their routes, and the writer that records a completion."""
