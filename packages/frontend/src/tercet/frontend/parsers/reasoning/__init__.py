"""Reasoning notations, one per file."""
