"""Intake of requests: what is checked when they arrive, and what is rejected."""
